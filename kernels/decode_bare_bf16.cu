// decode over caches of codes without scales ("fp8"), with bf16 or e4m3 queries: see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL(fm_decode_bf16_576_bare_64, __nv_bfloat16, 576, Bare, 64)
FM_DECODE_KERNELS(fm_decode_bf16_576_bare_32, __nv_bfloat16, 576, Bare, 32)
FM_DECODE_KERNELS(fm_decode_bf16_576_bare_16, __nv_bfloat16, 576, Bare, 16)
FM_DECODE_KERNEL(fm_decode_bf16_512_bare_64, __nv_bfloat16, 512, Bare, 64)
FM_DECODE_KERNELS(fm_decode_bf16_512_bare_32, __nv_bfloat16, 512, Bare, 32)
FM_DECODE_KERNELS(fm_decode_bf16_512_bare_16, __nv_bfloat16, 512, Bare, 16)
