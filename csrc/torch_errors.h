// Errors of torch's C functions in torch's own words: running out of memory then says how much was asked for. The macro
// of torch's headers only knows which call failed; the words are there from torch 2.13 on. Every source is compiled
// with this file first, so that the functions in torch's headers report like ours.
#pragma once

#include <torch/headeronly/util/shim_utils.h>

#include <stdexcept>
#include <string>

#if defined(__ELF__)
extern "C" const char* torch_exception_get_what_without_backtrace() __attribute__((weak));
#endif

namespace wnfused {

[[noreturn]] inline void throw_torch_error(const char* call, const char* file, int line) {
#if defined(__ELF__)
  if (torch_exception_get_what_without_backtrace) {
    const char* words = torch_exception_get_what_without_backtrace();
    if (words && *words) throw std::runtime_error(words);
  }
#endif
  throw std::runtime_error(std::string(call) + " failed at " + file + ", line " + std::to_string(line));
}

}  // namespace wnfused

#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call) \
  if ((call) != TORCH_SUCCESS) {     \
    ::wnfused::throw_torch_error(#call, __FILE__, __LINE__); \
  }
