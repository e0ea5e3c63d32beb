// Package faulty breaks, for tests, what stands between an API server and its etcd and around it: ways over TCP that lose,
// hold and delay what they carry (Link), and the wall clock of a process (Clock).
package faulty
