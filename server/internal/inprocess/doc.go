// Package inprocess sends the requests of a server's own clients to the server's handler, without a
// connection.
//
// kube-apiserver reads its own objects (pods, nodes, roles, definitions, quotas, ...) with clients
// of its own API. Over the loopback connection, each event is written, encrypted, decrypted and
// read in the same process. A Transport calls the handler instead, on a goroutine for each request,
// as HTTP/2 does. The handler receives the request that the connection would have delivered, so
// every filter runs; the client receives the response that it would have read.
package inprocess
