// A disk that fails on request: preloaded into a process, it stands between Python and the C
// library for everything below one folder. faulty_disk() says which operation goes wrong and how,
// faulty_disk_count() how many there were. Unarmed it changes nothing.

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

// The same numbers are in faulty_disk.py.
enum { LOOK = 1, OPEN = 2, CREATE = 4, MKDIR = 8, READ = 16, WRITE = 32, RENAME = 64, REMOVE = 128,
       LOCK = 256, MODE = 512, SYNC = 1024, CLOSE = 2048 };
#define KILL (-1)
#define FDS 65536

static char folder[4096];
static size_t folder_length;
static long fail_at, seen;
static int code, lasting, step, pause_us;
static unsigned kinds;
static unsigned char inside[FDS];  // which file descriptors belong to files below the folder

// From operation number `at` (of the kinds given, from 1; 0: never) below `under`: errno `what`, or
// KILL for a SIGKILL; only that one, or with `forever` all after it too. `bytes`: the most that one
// write takes (0: all). `microseconds`: a rest before each operation.
void faulty_disk(const char *under, long at, int what, int forever, unsigned which, int bytes,
                 int microseconds) {
    strncpy(folder, under, sizeof folder - 1);
    folder_length = strlen(folder);
    fail_at = at, code = what, lasting = forever, kinds = which, step = bytes;
    pause_us = microseconds;
    __atomic_store_n(&seen, 0, __ATOMIC_SEQ_CST);
}

long faulty_disk_count(void) { return __atomic_load_n(&seen, __ATOMIC_SEQ_CST); }

static int fails(unsigned kind) {
    if (!(kinds & kind)) return 0;
    if (pause_us) usleep(pause_us);
    long number = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
    if (!fail_at || (lasting ? number < fail_at : number != fail_at)) return 0;
    if (code == KILL) kill(getpid(), SIGKILL);
    errno = code;
    return 1;
}

static int below(const char *path) {
    return folder_length && path && !strncmp(path, folder, folder_length) &&
           (path[folder_length] == '/' || !path[folder_length]);
}

static int fd_below(int fd) { return fd >= 0 && fd < FDS && inside[fd]; }

static int at_below(int at, const char *path) {
    if (path && path[0] == '/') return below(path);
    return fd_below(at);
}

static int noted(int fd, int is_below) {
    if (fd >= 0 && fd < FDS) inside[fd] = is_below;
    return fd;
}

#define REAL(name) \
    static typeof(&name) real; \
    if (!real) real = (typeof(&name))dlsym(RTLD_NEXT, #name)

// One function of the C library: where the call is below the folder and fails, `bad` is returned.
#define WRAP(type, name, params, args, kind, is_below, bad) \
    type name params { \
        REAL(name); \
        if ((is_below) && fails(kind)) return bad; \
        return real args; \
    }

static unsigned kind_of(int flags) {
    return flags & (O_CREAT | O_WRONLY | O_RDWR) ? CREATE : OPEN;
}

#define OPENING(name, params, args, is_below) \
    int name params { \
        REAL(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        int mine = is_below; \
        if (mine && fails(kind_of(flags))) return -1; \
        return noted(real args, mine); \
    }

OPENING(open, (const char *path, int flags, ...), (path, flags, mode), below(path))
OPENING(open64, (const char *path, int flags, ...), (path, flags, mode), below(path))
OPENING(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode),
        at_below(at, path))
OPENING(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode),
        at_below(at, path))

int close(int fd) {
    REAL(close);
    int mine = fd_below(fd);
    noted(fd, 0);
    int result = real(fd);
    // The descriptor is gone either way, as it is on a network drive that reports late.
    return mine && fails(CLOSE) ? -1 : result;
}

int dup2(int from, int to) {
    REAL(dup2);
    return noted(real(from, to), fd_below(from));
}

#define FCNTL(name) \
    int name(int fd, int command, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, command); \
        void *argument = va_arg(rest, void *); \
        va_end(rest); \
        int locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || \
                    command == F_OFD_SETLKW; \
        if (locks && fd_below(fd) && fails(LOCK)) return -1; \
        int result = real(fd, command, argument); \
        if (command == F_DUPFD || command == F_DUPFD_CLOEXEC) noted(result, fd_below(fd)); \
        return result; \
    }
FCNTL(fcntl)
FCNTL(fcntl64)

#define WRITING(name, params, args) \
    ssize_t name params { \
        REAL(name); \
        if (fd_below(fd)) { \
            if (fails(WRITE)) return -1; \
            if (step && size > (size_t)step) size = step; \
        } \
        return real args; \
    }
WRITING(write, (int fd, const void *data, size_t size), (fd, data, size))
WRITING(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
WRITING(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
WRAP(ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count), WRITE,
     fd_below(fd), -1)
WRAP(int, ftruncate, (int fd, off_t size), (fd, size), WRITE, fd_below(fd), -1)
WRAP(int, ftruncate64, (int fd, off64_t size), (fd, size), WRITE, fd_below(fd), -1)

WRAP(ssize_t, read, (int fd, void *data, size_t size), (fd, data, size), READ, fd_below(fd), -1)
WRAP(ssize_t, pread, (int fd, void *data, size_t size, off_t at), (fd, data, size, at), READ,
     fd_below(fd), -1)
WRAP(ssize_t, pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at), READ,
     fd_below(fd), -1)
WRAP(off_t, lseek, (int fd, off_t at, int from), (fd, at, from), READ, fd_below(fd), -1)
WRAP(off64_t, lseek64, (int fd, off64_t at, int from), (fd, at, from), READ, fd_below(fd), -1)

WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode), MKDIR, below(path), -1)
WRAP(int, mkdirat, (int at, const char *path, mode_t mode), (at, path, mode), MKDIR,
     at_below(at, path), -1)
WRAP(int, rename, (const char *old, const char *new), (old, new), RENAME,
     below(old) || below(new), -1)
WRAP(int, renameat, (int at, const char *old, int to, const char *new), (at, old, to, new), RENAME,
     at_below(at, old) || at_below(to, new), -1)
WRAP(int, link, (const char *old, const char *new), (old, new), RENAME, below(old) || below(new),
     -1)
WRAP(int, linkat, (int at, const char *old, int to, const char *new, int flags),
     (at, old, to, new, flags), RENAME, at_below(at, old) || at_below(to, new), -1)
WRAP(int, unlink, (const char *path), (path), REMOVE, below(path), -1)
WRAP(int, unlinkat, (int at, const char *path, int flags), (at, path, flags), REMOVE,
     at_below(at, path), -1)
WRAP(int, rmdir, (const char *path), (path), REMOVE, below(path), -1)
WRAP(int, flock, (int fd, int how), (fd, how), LOCK, fd_below(fd), -1)
WRAP(int, lockf, (int fd, int how, off_t size), (fd, how, size), LOCK, fd_below(fd), -1)
WRAP(int, lockf64, (int fd, int how, off64_t size), (fd, how, size), LOCK, fd_below(fd), -1)
WRAP(int, chmod, (const char *path, mode_t mode), (path, mode), MODE, below(path), -1)
WRAP(int, fchmod, (int fd, mode_t mode), (fd, mode), MODE, fd_below(fd), -1)
WRAP(int, fchmodat, (int at, const char *path, mode_t mode, int flags), (at, path, mode, flags),
     MODE, at_below(at, path), -1)
WRAP(int, utimensat, (int at, const char *path, const struct timespec times[2], int flags),
     (at, path, times, flags), MODE, at_below(at, path), -1)
WRAP(int, futimens, (int fd, const struct timespec times[2]), (fd, times), MODE, fd_below(fd), -1)
WRAP(int, fsync, (int fd), (fd), SYNC, fd_below(fd), -1)
WRAP(int, fdatasync, (int fd), (fd), SYNC, fd_below(fd), -1)

WRAP(int, access, (const char *path, int mode), (path, mode), LOOK, below(path), -1)
WRAP(int, faccessat, (int at, const char *path, int mode, int flags), (at, path, mode, flags), LOOK,
     at_below(at, path), -1)
WRAP(ssize_t, readlink, (const char *path, char *to, size_t size), (path, to, size), LOOK,
     below(path), -1)
WRAP(ssize_t, readlinkat, (int at, const char *path, char *to, size_t size), (at, path, to, size),
     LOOK, at_below(at, path), -1)
WRAP(int, stat, (const char *path, struct stat *to), (path, to), LOOK, below(path), -1)
WRAP(int, stat64, (const char *path, struct stat64 *to), (path, to), LOOK, below(path), -1)
WRAP(int, lstat, (const char *path, struct stat *to), (path, to), LOOK, below(path), -1)
WRAP(int, lstat64, (const char *path, struct stat64 *to), (path, to), LOOK, below(path), -1)
WRAP(int, fstat, (int fd, struct stat *to), (fd, to), LOOK, fd_below(fd), -1)
WRAP(int, fstat64, (int fd, struct stat64 *to), (fd, to), LOOK, fd_below(fd), -1)
WRAP(int, fstatat, (int at, const char *path, struct stat *to, int flags), (at, path, to, flags),
     LOOK, at_below(at, path), -1)
WRAP(int, fstatat64, (int at, const char *path, struct stat64 *to, int flags),
     (at, path, to, flags), LOOK, at_below(at, path), -1)

// What Pythons built against a C library older than 2.33 call instead; only there if asked for.
#define OLD_STAT(name, params, args, is_below) \
    int name params { \
        static int (*real) params; \
        if (!real) real = (int(*) params)dlsym(RTLD_NEXT, #name); \
        if ((is_below) && fails(LOOK)) return -1; \
        return real args; \
    }
OLD_STAT(__xstat, (int v, const char *path, struct stat *to), (v, path, to), below(path))
OLD_STAT(__xstat64, (int v, const char *path, struct stat64 *to), (v, path, to), below(path))
OLD_STAT(__lxstat, (int v, const char *path, struct stat *to), (v, path, to), below(path))
OLD_STAT(__lxstat64, (int v, const char *path, struct stat64 *to), (v, path, to), below(path))
OLD_STAT(__fxstat, (int v, int fd, struct stat *to), (v, fd, to), fd_below(fd))
OLD_STAT(__fxstat64, (int v, int fd, struct stat64 *to), (v, fd, to), fd_below(fd))
OLD_STAT(__fxstatat, (int v, int at, const char *path, struct stat *to, int flags),
         (v, at, path, to, flags), at_below(at, path))
OLD_STAT(__fxstatat64, (int v, int at, const char *path, struct stat64 *to, int flags),
         (v, at, path, to, flags), at_below(at, path))

DIR *opendir(const char *path) {
    REAL(opendir);
    int mine = below(path);
    if (mine && fails(LOOK)) return NULL;
    DIR *made = real(path);
    if (made) noted(dirfd(made), mine);
    return made;
}

int closedir(DIR *stream) {
    REAL(closedir);
    noted(dirfd(stream), 0);
    return real(stream);
}

WRAP(DIR *, fdopendir, (int fd), (fd), LOOK, fd_below(fd), NULL)
WRAP(struct dirent *, readdir, (DIR * stream), (stream), LOOK, fd_below(dirfd(stream)), NULL)
WRAP(struct dirent64 *, readdir64, (DIR * stream), (stream), LOOK, fd_below(dirfd(stream)), NULL)
