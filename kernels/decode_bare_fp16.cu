// decode over caches of codes without scales ("fp8"), with fp16 queries: see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL(fm_decode_fp16_576_bare_64, __half, 576, Bare, 64)
FM_DECODE_KERNELS(fm_decode_fp16_576_bare_32, __half, 576, Bare, 32)
FM_DECODE_KERNELS(fm_decode_fp16_576_bare_16, __half, 576, Bare, 16)
FM_DECODE_KERNEL(fm_decode_fp16_512_bare_64, __half, 512, Bare, 64)
FM_DECODE_KERNELS(fm_decode_fp16_512_bare_32, __half, 512, Bare, 32)
FM_DECODE_KERNELS(fm_decode_fp16_512_bare_16, __half, 512, Bare, 16)
