//go:build !linux

package loopback

import (
	"fmt"
	"net"
)

func reserve(port int) (int, func() error, error) {
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return 0, nil, err
	}
	return l.Addr().(*net.TCPAddr).Port, func() error { return nil }, l.Close()
}
