package balancer

import (
	"io"
	"net"
	"sync"
)

// join copies bytes in both directions and closes both connections when the server has ended, when
// the client has ended and the server has received its last bytes and ended too, or after an error.
// It returns when both directions have ended.
func join(client, server net.Conn) {
	var back sync.WaitGroup
	back.Go(func() {
		_, _ = io.Copy(client, server) // either end may fail; both ends are closed then
		client.Close()
		server.Close()
	})
	if _, err := io.Copy(server, client); err != nil || closeWrite(server) != nil {
		client.Close()
		server.Close()
	}
	back.Wait()
}

// closeWrite sends the end of the stream and continues to receive.
func closeWrite(conn net.Conn) error {
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return conn.Close()
}
