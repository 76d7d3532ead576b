// decode over quantised caches, and sparse attention over any, with fp16 queries: see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL(fm_decode_fp16_576_codes_64, __half, 576, Codes, 64)
FM_DECODE_KERNEL(fm_decode_fp16_576_codes_16, __half, 576, Codes, 16)
FM_DECODE_KERNEL(fm_decode_fp16_512_codes_64, __half, 512, Codes, 64)
FM_DECODE_KERNEL(fm_decode_fp16_512_codes_16, __half, 512, Codes, 16)
