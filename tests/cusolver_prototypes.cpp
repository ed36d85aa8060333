// Whether cuda/cusolver.h declares what cusolverDn.h declares. Compiled by test_cusolver.py, never linked.
//
// A parameter agrees if the types are the same, or both are enumerations of one size, or both point to something that
// is declared and no more; constants of enumerations are compared by value.
#include <cusolverDn.h>

#include <type_traits>

#include "cuda/cusolver.h"

namespace {

using namespace wnfused::gpu::cusolver;

template <class Ours, class Theirs>
constexpr bool agree() {
  if constexpr (std::is_same_v<Ours, Theirs>)
    return true;
  else if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using A = std::remove_pointer_t<Ours>;
    using B = std::remove_pointer_t<Theirs>;
    if constexpr (std::is_pointer_v<A> || std::is_pointer_v<B>)
      return agree<A, B>();
    else
      return std::is_class_v<A> && std::is_class_v<B>;
  } else
    return std::is_enum_v<Ours> && std::is_enum_v<Theirs> && sizeof(Ours) == sizeof(Theirs);
}

template <class Ours, class Theirs>
struct Same : std::false_type {};
template <class A, class... As, class B, class... Bs>
struct Same<A(As...), B(Bs...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(As) == sizeof...(Bs))
      return (agree<A, B>() && ... && agree<As, Bs>());
    else
      return false;
  }();
};

#define CHECK(ours, theirs) \
  static_assert(Same<std::remove_pointer_t<decltype(Library::ours)>, decltype(theirs)>::value, #ours " differs")

CHECK(create, cusolverDnCreate);
CHECK(destroy, cusolverDnDestroy);
CHECK(set_stream, cusolverDnSetStream);
CHECK(create_parameters, cusolverDnCreateParams);
CHECK(geqrf_size, cusolverDnXgeqrf_bufferSize);
CHECK(geqrf, cusolverDnXgeqrf);
CHECK(sorgqr_size, cusolverDnSorgqr_bufferSize);
CHECK(sorgqr, cusolverDnSorgqr);
CHECK(dorgqr_size, cusolverDnDorgqr_bufferSize);
CHECK(dorgqr, cusolverDnDorgqr);
CHECK(syev_batched_size, cusolverDnXsyevBatched_bufferSize);
CHECK(syev_batched, cusolverDnXsyevBatched);
CHECK(create_jacobi, cusolverDnCreateGesvdjInfo);
CHECK(destroy_jacobi, cusolverDnDestroyGesvdjInfo);
CHECK(set_tolerance, cusolverDnXgesvdjSetTolerance);
CHECK(set_sort, cusolverDnXgesvdjSetSortEig);
CHECK(sgesvdj_batched_size, cusolverDnSgesvdjBatched_bufferSize);
CHECK(sgesvdj_batched, cusolverDnSgesvdjBatched);
CHECK(dgesvdj_batched_size, cusolverDnDgesvdjBatched_bufferSize);
CHECK(dgesvdj_batched, cusolverDnDgesvdjBatched);

static_assert(int(Status::kSuccess) == CUSOLVER_STATUS_SUCCESS);
static_assert(int(Status::kAllocFailed) == CUSOLVER_STATUS_ALLOC_FAILED);
static_assert(int(EigenMode::kValues) == CUSOLVER_EIG_MODE_NOVECTOR);
static_assert(int(EigenMode::kVectors) == CUSOLVER_EIG_MODE_VECTOR);
static_assert(int(Triangle::kLower) == CUBLAS_FILL_MODE_LOWER && int(Triangle::kUpper) == CUBLAS_FILL_MODE_UPPER);

}  // namespace
