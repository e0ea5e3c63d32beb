// Package mirror keeps a consistent copy of a key range of etcd in memory.
package mirror
