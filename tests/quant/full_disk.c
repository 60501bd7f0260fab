/* Lets `write` and its like fail as on a full disk, from the FULL_AT-th call on files below FULL_OUTPUT on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>
static int calls;
static int full(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    const char *output = getenv("FULL_OUTPUT"), *at = getenv("FULL_AT"), *count = getenv("FULL_COUNT");
    if (length < 0 || !output) return 0;
    path[length] = 0;
    if (strncmp(path, output, strlen(output))) return 0;
    int number = __sync_add_and_fetch(&calls, 1);
    if (count) { FILE *told = fopen(count, "w"); fprintf(told, "%d", number); fclose(told); }
    if (!at || number < atoi(at)) return 0;
    errno = ENOSPC;
    return 1;
}
#define NEXT(name) static __typeof__(&name) next; if (!next) next = dlsym(RTLD_NEXT, #name)
ssize_t write(int f, const void *b, size_t n) { NEXT(write); return full(f) ? -1 : next(f, b, n); }
ssize_t pwrite64(int f, const void *b, size_t n, off64_t o) { NEXT(pwrite64); return full(f) ? -1 : next(f, b, n, o); }
ssize_t pwritev64(int f, const struct iovec *v, int n, off64_t o) {
    NEXT(pwritev64);
    return full(f) ? -1 : next(f, v, n, o);
}
int fsync(int f) { NEXT(fsync); return full(f) ? -1 : next(f); }
ssize_t sendfile64(int to, int from, off64_t *o, size_t n);
ssize_t sendfile64(int to, int from, off64_t *o, size_t n) {
    NEXT(sendfile64);
    return full(to) ? -1 : next(to, from, o, n);
}
