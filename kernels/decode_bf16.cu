// decode over a bf16 cache: see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL(fm_decode_bf16_576_tma, __nv_bfloat16, 576, Tma)
FM_DECODE_KERNEL(fm_decode_bf16_576_gather, __nv_bfloat16, 576, Gather)
FM_DECODE_KERNEL(fm_decode_bf16_512_tma, __nv_bfloat16, 512, Tma)
FM_DECODE_KERNEL(fm_decode_bf16_512_gather, __nv_bfloat16, 512, Gather)
