// decode over a fp16 cache: see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL(fm_decode_fp16_576_tma, __half, 576, Tma)
FM_DECODE_KERNEL(fm_decode_fp16_576_gather, __half, 576, Gather)
FM_DECODE_KERNEL(fm_decode_fp16_512_tma, __half, 512, Tma)
FM_DECODE_KERNEL(fm_decode_fp16_512_gather, __half, 512, Gather)
