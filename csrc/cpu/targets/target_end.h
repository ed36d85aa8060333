// Closes what target_<isa>.h opened.
#if WNFUSED_VECTOR_BITS > 128
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
