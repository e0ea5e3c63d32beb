module github.com/stratakube/strata

go 1.26.0

require (
	go.etcd.io/etcd/api/v3 v3.6.8
	go.etcd.io/etcd/client/v3 v3.6.8
)

require pgregory.net/rapid v1.3.0 // indirect
