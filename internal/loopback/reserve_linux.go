package loopback

import (
	"fmt"
	"os"
	"syscall"
)

// reserve binds a socket that never listens to a port, 0 for any. Linux admits a second socket with
// SO_REUSEADDR to its port if both have the option and the first is not listening (socket(7)), but
// never chooses that port by itself (inet_csk_find_open_port and __inet_hash_connect in net/ipv4).
func reserve(port int) (int, func() error, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, nil, os.NewSyscallError("socket", err)
	}
	release := func() error { return os.NewSyscallError("close", syscall.Close(fd)) }
	number, err := bind(fd, port)
	if err != nil {
		_ = release() // err is the reason
		return 0, nil, err
	}
	return number, release, nil
}

func bind(fd, port int) (int, error) {
	if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		return 0, os.NewSyscallError("setsockopt", err)
	}
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, os.NewSyscallError("bind", err)
	}
	address, err := syscall.Getsockname(fd)
	if err != nil {
		return 0, os.NewSyscallError("getsockname", err)
	}
	in, ok := address.(*syscall.SockaddrInet4)
	if !ok {
		return 0, fmt.Errorf("bound to %T", address)
	}
	return in.Port, nil
}
