/* Preloaded into a log server: remembers how much of each file a power cut would leave, in FILE.synced, and lets the
   disk be full for as long as there is a file "full" beside them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The path of an append-only file, and its length; else 0. */
static ssize_t log_path(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX);
    if (length <= 0) return 0;
    path[length] = 0;
    return strstr(path, ".aof") ? length : 0;
}

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    char path[PATH_MAX + 16];
    if (!real) real = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    if (log_path(fd, path)) {
        strcpy(strrchr(path, '/') + 1, "full");
        if (access(path, F_OK) == 0) {
            errno = ENOSPC;
            return -1;
        }
    }
    return real(fd, data, size);
}

static void remember(int fd, off_t size) {
    char path[PATH_MAX + 16], text[32];
    ssize_t length = log_path(fd, path);
    if (!length) return;
    strcpy(path + length, ".synced");
    int file = open(path, O_WRONLY | O_CREAT, 0644);
    if (file < 0) return;
    int digits = snprintf(text, sizeof text, "%020lld", (long long)size);
    if (pwrite(file, text, digits, 0) != digits) unlink(path);
    close(file);
}

static int synced(const char *name, int fd) {
    struct stat before;
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    int known = fstat(fd, &before); /* what is written while the disk works may not be on it */
    int result = real(fd);
    if (result == 0 && known == 0 && S_ISREG(before.st_mode)) remember(fd, before.st_size);
    return result;
}

int fdatasync(int fd) { return synced("fdatasync", fd); }
int fsync(int fd) { return synced("fsync", fd); }
