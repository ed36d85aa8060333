// Memory for what is large. From 1 MB on it is mapped by itself instead of taken from the C library's heap: what is
// given up goes back to the system at once, whatever was allocated behind it, and huge pages are asked for nothing
// else.
#pragma once

#include <cstdint>
#include <memory>

namespace wnfused::cpu {

class Pages {
 public:
  // Uninitialised, at the beginning of a cache line. Null where there is no memory, in the heap either.
  static std::unique_ptr<Pages> allocate(int64_t floats);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  float* data() const { return data_; }
  int64_t floats() const { return floats_; }
  int64_t bytes() const { return floats_ * static_cast<int64_t>(sizeof(float)); }

 private:
  Pages() = default;

  float* data_ = nullptr;
  int64_t floats_ = 0;
  bool mapped_ = false;
};

}  // namespace wnfused::cpu
