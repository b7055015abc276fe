/* exp2.h - coefficients of 2^x on [-1/2, 1/2], minimax in relative error (7.5e-8), degree 5. */
#ifndef NEAP_ATTN_EXP2_H
#define NEAP_ATTN_EXP2_H

#define NEAP_EXP2_C0 0x1.000002p+0f
#define NEAP_EXP2_C1 0x1.62e428p-1f
#define NEAP_EXP2_C2 0x1.ebf918p-3f
#define NEAP_EXP2_C3 0x1.c6b6e4p-5f
#define NEAP_EXP2_C4 0x1.3d0c52p-7f
#define NEAP_EXP2_C5 0x1.5c08e6p-10f
#endif
