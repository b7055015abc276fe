/* codec_int.h - the codecs behind the registry. */
#ifndef NEAP_CODEC_INT_H
#define NEAP_CODEC_INT_H

#include "codec.h"

extern const neap_codec neap_codec_none, neap_codec_q8, neap_codec_cachegen;
#endif
