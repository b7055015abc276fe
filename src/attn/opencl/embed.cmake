# embed.cmake - writes OUT, a C file with the texts of INPUTS (joined by |) as neap_attend_source.
string(REPLACE "|" ";" INPUTS "${INPUTS}")
set(bytes "")
foreach(input ${INPUTS})
    file(READ ${input} hex HEX)
    string(APPEND bytes "${hex}")
endforeach()
string(LENGTH "${bytes}" digits)
math(EXPR len "${digits} / 2")
string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
string(REGEX REPLACE "(................................................................................)" "\\1\n" bytes "${bytes}")
file(WRITE ${OUT} "#include <stddef.h>
extern const char neap_attend_source[];
extern const size_t neap_attend_source_len;
const char neap_attend_source[] = {\n${bytes}0};
const size_t neap_attend_source_len = ${len};
")
