// decode over quantised caches, and sparse attention over them, with bf16 or e4m3 queries: see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL(fm_decode_bf16_576_raw_64, __nv_bfloat16, 576, Raw, 64)
FM_DECODE_KERNELS(fm_decode_bf16_576_raw_32, __nv_bfloat16, 576, Raw, 32)
FM_DECODE_KERNELS(fm_decode_bf16_576_raw_16, __nv_bfloat16, 576, Raw, 16)
FM_DECODE_KERNEL(fm_decode_bf16_512_raw_64, __nv_bfloat16, 512, Raw, 64)
FM_DECODE_KERNELS(fm_decode_bf16_512_raw_32, __nv_bfloat16, 512, Raw, 32)
FM_DECODE_KERNELS(fm_decode_bf16_512_raw_16, __nv_bfloat16, 512, Raw, 16)
