// Sparse attention over a quantised cache beside one of 16-bit numbers, or over fp8_v4 beside e2m1 codes with 16 query rows, with bf16
// queries: see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL(fm_decode_bf16_576_codes_64, __nv_bfloat16, 576, Codes, 64)
FM_DECODE_KERNELS(fm_decode_bf16_576_codes_16, __nv_bfloat16, 576, Codes, 16)
FM_DECODE_KERNEL(fm_decode_bf16_512_codes_64, __nv_bfloat16, 512, Codes, 64)
FM_DECODE_KERNELS(fm_decode_bf16_512_codes_16, __nv_bfloat16, 512, Codes, 16)
