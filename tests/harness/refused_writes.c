/* Loaded before all other libraries (LD_PRELOAD): lets the n-th step of a write below one folder fail.

   A step is an open that may write, a write, an fsync, a new folder or a rename. So it reaches Python, C++ and Rust
   alike. After that step all others fail too, but for renames: these need no space. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static int left = -1, refused, code;

/* From now on the n-th step below `folder` fails with `error`; n < 0: none does. */
void refuse_writes(const char *folder, int n, int error) {
  snprintf(root, sizeof root, "%s", folder);
  refused = 0, code = error;
  __atomic_store_n(&left, n, __ATOMIC_SEQ_CST);
}

int writes_were_refused(void) { return refused; }

static int refuse(const char *path, int again) {
  if (__atomic_load_n(&left, __ATOMIC_SEQ_CST) < 0 || strncmp(path, root, strlen(root))) return 0;
  if (left > 0) {
    __atomic_sub_fetch(&left, 1, __ATOMIC_SEQ_CST);
    return 0;
  }
  if (refused && !again) return 0;
  refused++;
  errno = code;
  return 1;
}

static int refuse_descriptor(int fd) {
  if (__atomic_load_n(&left, __ATOMIC_SEQ_CST) < 0) return 0;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return refuse(path, 1);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MODE va_list list; va_start(list, flags); int mode = va_arg(list, int); va_end(list);
#define WRITES (flags & (O_WRONLY | O_RDWR))

int open(const char *path, int flags, ...) {
  MODE if (WRITES && refuse(path, 1)) return -1;
  return NEXT(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
  MODE if (WRITES && refuse(path, 1)) return -1;
  return NEXT(open64)(path, flags, mode);
}
FILE *fopen64(const char *path, const char *how) {
  if (strpbrk(how, "wa+") && refuse(path, 1)) return 0;
  return NEXT(fopen64)(path, how);
}
FILE *fopen(const char *path, const char *how) {
  if (strpbrk(how, "wa+") && refuse(path, 1)) return 0;
  return NEXT(fopen)(path, how);
}
ssize_t write(int fd, const void *data, size_t count) {
  return refuse_descriptor(fd) ? -1 : NEXT(write)(fd, data, count);
}
ssize_t pwrite(int fd, const void *data, size_t count, off_t at) {
  return refuse_descriptor(fd) ? -1 : NEXT(pwrite)(fd, data, count, at);
}
ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at) {
  return refuse_descriptor(fd) ? -1 : NEXT(pwrite64)(fd, data, count, at);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
  return refuse_descriptor(fd) ? -1 : NEXT(writev)(fd, parts, count);
}
int fsync(int fd) { return refuse_descriptor(fd) ? -1 : NEXT(fsync)(fd); }
int rename(const char *from, const char *to) { return refuse(from, 0) ? -1 : NEXT(rename)(from, to); }
int mkdir(const char *path, mode_t mode) { return refuse(path, 1) ? -1 : NEXT(mkdir)(path, mode); }
