// Package faulty injects faults around an API server and its etcd, for tests: TCP proxies that
// lose, hold and delay bytes (Link), and the wall clock of a process (Clock).
package faulty
