/* How the ranks of a group find each other: the root listens on a socket whose name the kernel chose (it travels in the
 * root info, by the framework's store), and passes the memfd of the group to each rank that connects.
 *
 * Abstract sockets and memfds have no name in the file system, so nothing stays behind, whoever is killed.
 */
#define _GNU_SOURCE
#include "hccl.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ROOTS = 64 };

typedef struct {
    int fd;
    char name[16];
} Root;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Root roots[MAX_ROOTS]; /* sockets of root infos that this process gave out and has not used yet */

HcclResult HcclGetRootInfo(HcclRootInfo *info) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t length = sizeof(sa_family_t); /* no name given: the kernel makes one, \0 and five digits */
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return vhccl_fail(VHCCL_SYSCALL, "socket");
    if (bind(fd, (struct sockaddr *)&address, length) || listen(fd, VHCCL_MAX_RANKS)) return close(fd),
        vhccl_fail(VHCCL_SYSCALL, "listen");
    length = sizeof address;
    getsockname(fd, (struct sockaddr *)&address, &length);
    memset(info, 0, sizeof *info);
    memcpy(info->internal, address.sun_path + 1, length - sizeof(sa_family_t) - 1);
    pthread_mutex_lock(&lock);
    Root *root = roots;
    while (root < roots + MAX_ROOTS && root->fd) root++;
    bool room = root < roots + MAX_ROOTS;
    if (room) {
        root->fd = fd;
        snprintf(root->name, sizeof root->name, "%s", info->internal);
    }
    pthread_mutex_unlock(&lock);
    if (room) return VHCCL_OK;
    close(fd);
    vnpu_error(VHCCL_INTERNAL, "HCCL: %d root infos were made and never used", MAX_ROOTS);
    return VHCCL_INTERNAL;
}

/* The listening socket if this process made the root info, else -1. It is the caller's from now on. */
static int take_root(const char *name) {
    int fd = -1;
    pthread_mutex_lock(&lock);
    for (Root *root = roots; root < roots + MAX_ROOTS; root++) {
        if (!root->fd || strcmp(root->name, name)) continue;
        fd = root->fd;
        root->fd = 0;
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

typedef union {
    struct cmsghdr header;
    char room[CMSG_SPACE(sizeof(int))];
} Control;

static bool send_fd(int connection, int fd) {
    char byte = 0;
    Control control = {0};
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control,
        .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    return sendmsg(connection, &message, MSG_NOSIGNAL) == 1;
}

static int receive_fd(int connection) {
    char byte;
    int fd = -1;
    Control control = {0};
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control,
        .msg_controllen = sizeof control};
    if (recvmsg(connection, &message, MSG_CMSG_CLOEXEC) == 1 && CMSG_FIRSTHDR(&message))
        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

/* Root: make the memory and hand it to the other `size - 1` ranks. Processes of other users get nothing. */
static int serve(int listener, uint32_t size, size_t bytes, uint64_t deadline) {
    int fd = memfd_create("npu-backend-hccl", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes)) return fd;
    for (uint32_t served = 1; served < size;) {
        struct pollfd ready = {listener, POLLIN, 0};
        uint64_t now = vnpu_now();
        int left = now < deadline ? (int)((deadline - now) / 1000000) : 0;
        if (poll(&ready, 1, left) == 0) return close(fd), errno = ETIMEDOUT, -1;
        int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (connection < 0) continue;
        struct ucred peer = {0};
        socklen_t length = sizeof peer;
        getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &length);
        served += peer.uid == geteuid() && send_fd(connection, fd);
        close(connection);
    }
    return fd;
}

/* Other ranks: fetch the memory from the root. */
static int fetch(const char *name, uint64_t seconds) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strnlen(name, sizeof address.sun_path - 1);
    memcpy(address.sun_path + 1, name, length);
    int fd = -1, connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval limit = {(time_t)seconds, 0};
    setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (!connect(connection, (struct sockaddr *)&address,
        (socklen_t)(sizeof(sa_family_t) + 1 + length))) fd = receive_fd(connection);
    int error = errno;
    close(connection);
    errno = error;
    return fd;
}

int vhccl_rendezvous(const HcclRootInfo *info, uint32_t size, size_t bytes, uint64_t seconds) {
    int listener = take_root(info->internal);
    if (listener < 0) return fetch(info->internal, seconds);
    int fd = serve(listener, size, bytes, vnpu_now() + seconds * 1000000000u);
    int error = errno;
    close(listener);
    errno = error;
    return fd;
}
