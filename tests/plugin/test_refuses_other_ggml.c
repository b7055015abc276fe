/* A program whose ggml is of another version gets a refusal from the backend and runs on.
 * This program plays that host: it exports ggml_version() and loads the backend as ggml does. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

__attribute__((visibility("default"))) const char *ggml_version(void);
const char *ggml_version(void) {
    return "0.26.0";
}

int main(void) {
    void *library = dlopen(NEAP_PLUGIN, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    void *address = dlsym(library, "ggml_backend_init");
    void *(*init)(void) = NULL;
    memcpy(&init, &address, sizeof address);
    CHECK(init != NULL);

    FILE *log = tmpfile();
    int saved = dup(STDERR_FILENO);
    CHECK(log != NULL && dup2(fileno(log), STDERR_FILENO) >= 0);
    void *registration = init();
    void *again = init();
    dup2(saved, STDERR_FILENO);

    char said[512] = "";
    rewind(log);
    CHECK(fread(said, 1, sizeof said - 1, log) > 0);
    printf("%s", said);
    CHECK(registration == NULL && again == NULL);
    CHECK(strstr(said, "0.26.0") != NULL && strstr(said, "not used") != NULL);
    return 0;
}
