// The CUDA runtime of a machine with two pretended GPUs of sm_90. Their memory is the host's; what is put on a stream is
// done at once, and again by every launch of a graph that was recorded from the stream. A kernel of torch's own must not
// come here: gate.pretended.aten has others in their place. build.py adds the functions that torch links and nothing
// calls, which are refused.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kDevices = 2, kCuda = 13000;
constexpr size_t kMemory = size_t{78} << 30;  // of a device; pages that nobody touches take none of the host's
constexpr size_t kPoisoned = size_t{256} << 20;

struct Allocation {
  size_t bytes;
  int device;
};

struct Graph {
  std::vector<std::function<void()>> nodes;
};

std::recursive_mutex mutex;  // of all that follows
std::map<const char*, Allocation> allocations;
size_t used[kDevices];
std::map<const void*, std::string> kernels;
Graph* recording = nullptr;
std::vector<cudaStream_t> recorded_streams;
std::map<cudaEvent_t, bool> recorded_events;
unsigned long long recordings = 0;
uintptr_t handles = 1 << 12;

thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;

using Lock = std::lock_guard<std::recursive_mutex>;

cudaError_t failed(cudaError_t error) { return last = error; }

bool shapes_only() {
  static const bool only = std::getenv("WNFUSED_PRETENDED") && !std::strcmp(std::getenv("WNFUSED_PRETENDED"), "shapes");
  return only;
}

bool is_recorded(cudaStream_t stream) {
  return recording && std::count(recorded_streams.begin(), recorded_streams.end(), stream) > 0;
}

template <class Handle>
cudaError_t create(Handle* handle) {
  const Lock lock(mutex);
  *handle = reinterpret_cast<Handle>(++handles);
  return cudaSuccess;
}

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  work();
  const Lock lock(mutex);
  if (is_recorded(stream)) recording->nodes.push_back(std::move(work));
  return cudaSuccess;
}

// Numbers of some size are nobody's where only shapes are computed.
bool is_moved(size_t bytes) { return !shapes_only() || bytes <= 4096; }

}  // namespace

// ------------------------------------------------------------------------------------------- for gate.pretended

API int pretended_shapes_only() { return shapes_only(); }

API void pretended_arrays(void (*each)(void*, const char*, size_t), void* to) {
  const Lock lock(mutex);
  for (const auto& [data, allocation] : allocations) each(to, data, allocation.bytes);
}

API void pretended_record(cudaStream_t stream, void (*call)(void*), void* what) {
  const Lock lock(mutex);
  if (is_recorded(stream)) recording->nodes.push_back([=] { call(what); });
}

API int pretended_is_recording() { return recording != nullptr; }

// ------------------------------------------------------------------------------------------------------- devices

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return failed(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* facts, int device) {
  std::memset(facts, 0, sizeof *facts);
  std::strcpy(facts->name, "Pretended GPU");
  facts->uuid.bytes[0] = static_cast<char>(device);
  facts->pciBusID = device + 1;
  facts->major = 9;
  facts->totalGlobalMem = kMemory;
  facts->multiProcessorCount = 132;
  facts->maxThreadsPerMultiProcessor = 2048;
  facts->maxBlocksPerMultiProcessor = 32;
  facts->maxThreadsPerBlock = facts->maxThreadsDim[0] = facts->maxThreadsDim[1] = 1024;
  facts->maxThreadsDim[2] = 64;
  facts->maxGridSize[0] = 2147483647;
  facts->maxGridSize[1] = facts->maxGridSize[2] = 65535;
  facts->warpSize = 32;
  facts->regsPerBlock = facts->regsPerMultiprocessor = 65536;
  facts->sharedMemPerBlock = 48 << 10;
  facts->sharedMemPerBlockOptin = 227 << 10;
  facts->sharedMemPerMultiprocessor = 228 << 10;
  facts->l2CacheSize = 50 << 20;
  facts->unifiedAddressing = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp facts;
  cudaGetDeviceProperties(&facts, device);
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(facts.sharedMemPerBlockOptin);
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = facts.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = facts.minor;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = facts.multiProcessorCount;
      return cudaSuccess;
    default:
      std::fprintf(stderr, "attribute %d of a pretended GPU is not known\n", static_cast<int>(attribute));
      return failed(cudaErrorNotSupported);
  }
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  return recording ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = kCuda;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kCuda;
  return cudaSuccess;
}
API cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last; }
API const char* cudaGetErrorName(cudaError_t) { return "an error of a pretended GPU"; }
API const char* cudaGetErrorString(cudaError_t error) {
  thread_local char text[64];
  std::snprintf(text, sizeof text, "error %d of a pretended GPU", static_cast<int>(error));
  return text;
}

// -------------------------------------------------------------------------------------------------------- memory

API cudaError_t cudaMalloc(void** data, size_t bytes) {
  const Lock lock(mutex);
  if (used[current] + bytes > kMemory) return failed(cudaErrorMemoryAllocation);
  *data = mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*data == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  if (!shapes_only() && bytes <= kPoisoned) std::memset(*data, 0xff, bytes);  // NaNs, in every format
  allocations[static_cast<char*>(*data)] = {bytes, current};
  used[current] += bytes;
  return cudaSuccess;
}
API cudaError_t cudaFree(void* data) {
  if (!data) return cudaSuccess;
  const Lock lock(mutex);
  const auto found = allocations.find(static_cast<char*>(data));
  if (found == allocations.end()) return failed(cudaErrorInvalidValue);
  used[found->second.device] -= found->second.bytes;
  munmap(data, std::max<size_t>(found->second.bytes, 1));
  allocations.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaMallocAsync(void** data, size_t bytes, cudaStream_t) { return cudaMalloc(data, bytes); }
API cudaError_t cudaFreeAsync(void* data, cudaStream_t) { return cudaFree(data); }
API cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  return posix_memalign(data, 4096, std::max<size_t>(bytes, 1)) ? cudaErrorMemoryAllocation : cudaSuccess;
}
API cudaError_t cudaFreeHost(void* data) {
  std::free(data);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const Lock lock(mutex);
  *total = kMemory;
  *free = kMemory - used[current];
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* facts, const void* data) {
  const Lock lock(mutex);
  std::memset(facts, 0, sizeof *facts);
  facts->devicePointer = const_cast<void*>(data);
  auto next = allocations.upper_bound(static_cast<const char*>(data));
  if (next == allocations.begin()) return cudaSuccess;
  const auto& [start, allocation] = *--next;
  if (static_cast<const char*>(data) < start + allocation.bytes) {
    facts->type = cudaMemoryTypeDevice;
    facts->device = allocation.device;
  }
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (!is_moved(bytes)) return cudaSuccess;
  return enqueue(stream, [=] { std::memmove(to, from, bytes); });
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (!is_moved(bytes)) return cudaSuccess;
  return enqueue(stream, [=] { std::memset(to, value, bytes); });
}
API cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

// --------------------------------------------------------------------------------------------- streams and events

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return create(stream); }
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return create(stream); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const Lock lock(mutex);
  return is_recorded(stream) ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaStreamQuery(stream); }
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  call(stream, cudaSuccess, data);
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  return enqueue(stream, [=] { call(data); });
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return create(event); }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return create(event); }
API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1.0f;
  return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Lock lock(mutex);
  recorded_events[event] = is_recorded(stream);
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const Lock lock(mutex);
  if (recording && recorded_events[event] && !is_recorded(stream)) recorded_streams.push_back(stream);
  return cudaSuccess;
}

// -------------------------------------------------------------------------------------------------------- graphs

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  const Lock lock(mutex);
  if (!stream || recording) return failed(cudaErrorStreamCaptureUnsupported);
  recording = new Graph;
  recorded_streams = {stream};
  ++recordings;
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  const Lock lock(mutex);
  *graph = reinterpret_cast<cudaGraph_t>(std::exchange(recording, nullptr));
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  const Lock lock(mutex);
  *status = is_recorded(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = recordings;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(recording);
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode now = cudaStreamCaptureModeGlobal;
  std::swap(*mode, now);
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  for (const auto& node : reinterpret_cast<Graph*>(graph)->nodes) node();
  return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->nodes.size();
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

// ------------------------------------------------------------------------------------------- torch's own kernels

API cudaError_t __cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  const Lock lock(mutex);
  const std::string& name = kernels[kernel];
  if (name.find("spin_kernel") != std::string::npos) return cudaSuccess;  // torch.cuda._sleep
  std::fprintf(stderr, "no pretended GPU runs torch's %s\n", name.c_str());
  return failed(cudaErrorNotSupported);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
  return __cudaLaunchKernel(kernel, 1, 1, nullptr, 0, nullptr);
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                                int*) {
  const Lock lock(mutex);
  kernels[host] = name;
}
API void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 1; }
API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* facts, const void*) {
  std::memset(facts, 0, sizeof *facts);
  facts->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                       unsigned) {
  *blocks = 1;
  return cudaSuccess;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* found) {
  *function = nullptr;
  if (found) *found = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
