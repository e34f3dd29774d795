/* Preloaded into a log server: remembers how much of each file a power cut would leave, in FILE.synced. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void remember(int fd, off_t size) {
    char link[64], path[PATH_MAX + 16], text[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX);
    if (length < 0 || !strstr(path, ".aof")) return;
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
