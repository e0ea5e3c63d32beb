package up

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/stratakube/strata/internal/loopback"
	"github.com/stratakube/strata/server/internal/datadir"
)

// haProcess is a process with its ports of 127.0.0.1.
type haProcess struct {
	Name string `json:"name"`
	Port int    `json:"port"`           // for clients
	Peer int    `json:"peer,omitempty"` // of a member of etcd, for its peers
}

func (p haProcess) address() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(p.Port)) }
func (p haProcess) url() string     { return "https://" + p.address() }

// haLayout has the processes of a control plane and reserves their ports. Those of the members are
// in a file of the data directory, because etcd stores the addresses of members; those of others
// are chosen at each start.
type haLayout struct {
	Members  []haProcess `json:"etcd"`
	Servers  []haProcess `json:"-"`
	Replicas []haProcess `json:"-"`

	reserved []*loopback.Port
}

// The ports of members are chosen in this range, below those that systems assign to outgoing
// connections: another process then rarely uses one while the control plane is stopped.
const (
	firstMemberPort = 20000
	lastMemberPort  = 29999
	portAttempts    = 1000
)

// openLayout reads the layout of a data directory, or makes one, and reserves all ports.
func openLayout(dir *datadir.Dir) (_ *haLayout, err error) {
	l := &haLayout{}
	defer func() {
		if err != nil {
			l.release()
		}
	}()
	if err := os.MkdirAll(dir.HA(), 0o700); err != nil {
		return nil, fmt.Errorf("%w; make the data directory writable", err)
	}
	data, err := os.ReadFile(dir.HALayout())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = l.choose(dir.HALayout())
	case err != nil:
		err = fmt.Errorf("%w; make the file readable", err)
	default:
		err = l.parse(dir.HALayout(), data)
	}
	if err != nil {
		return nil, err
	}
	for i := range serverCount + replicaCount {
		port, err := loopback.Reserve()
		if err != nil {
			return nil, err
		}
		l.reserved = append(l.reserved, port)
		if i < serverCount {
			l.Servers = append(l.Servers, haProcess{Name: fmt.Sprintf("server-%d", i+1), Port: port.Number()})
		} else {
			l.Replicas = append(l.Replicas, haProcess{Name: fmt.Sprintf("replica-%d", i-serverCount+1), Port: port.Number()})
		}
	}
	return l, nil
}

// choose makes a layout of new members and writes it to path.
func (l *haLayout) choose(path string) error {
	for i := range memberCount {
		m := haProcess{Name: fmt.Sprintf("etcd-%d", i+1)}
		for _, number := range []*int{&m.Port, &m.Peer} {
			port, err := freePort(l.ports())
			if err != nil {
				return err
			}
			l.reserved = append(l.reserved, port)
			*number = port.Number()
		}
		l.Members = append(l.Members, m)
	}
	data, err := json.MarshalIndent(l, "", "  ")
	if err != nil {
		return err
	}
	if err := datadir.WriteFile(path, append(data, '\n')); err != nil {
		return fmt.Errorf("%w; make the data directory writable, or free space on its file system", err)
	}
	return nil
}

// ports returns the reserved ports.
func (l *haLayout) ports() map[int]bool {
	all := map[int]bool{}
	for _, p := range l.reserved {
		all[p.Number()] = true
	}
	return all
}

// freePort reserves a port of the range for members that is not in taken.
func freePort(taken map[int]bool) (*loopback.Port, error) {
	var last error
	for range portAttempts {
		number := firstMemberPort + rand.IntN(lastMemberPort-firstMemberPort+1)
		if taken[number] {
			continue
		}
		port, err := loopback.ReserveNumber(number)
		if err == nil {
			return port, nil
		}
		last = err
	}
	return nil, fmt.Errorf("no free port between %d and %d for etcd: %w; stop programs that listen there", firstMemberPort, lastMemberPort, last)
}

// parse reads the members of a layout and reserves their ports.
func (l *haLayout) parse(path string, data []byte) error {
	if err := json.Unmarshal(data, l); err != nil || len(l.Members) != memberCount {
		return fmt.Errorf("%s does not describe %d members of etcd; restore it from a backup, or choose another directory with --data-dir", path, memberCount)
	}
	for _, m := range l.Members {
		for _, number := range []int{m.Port, m.Peer} {
			port, err := loopback.ReserveNumber(number)
			if err != nil {
				return fmt.Errorf("%s: port %d, which etcd's data names: %w; stop the program that listens on it", m.Name, number, err)
			}
			l.reserved = append(l.reserved, port)
		}
	}
	return nil
}

// release ends the reservations.
func (l *haLayout) release() {
	for _, port := range l.reserved {
		_ = port.Release() // of a port that nothing uses any more
	}
	l.reserved = nil
}

// all returns the processes in the order of their starts.
func (l *haLayout) all() []haProcess {
	return slices.Concat(l.Members, l.Servers, l.Replicas)
}

// endpoints returns the value of --etcd-servers.
func (l *haLayout) endpoints() string {
	var urls []string
	for _, m := range l.Members {
		urls = append(urls, m.url())
	}
	return strings.Join(urls, ",")
}

// cluster returns the value of --initial-cluster.
func (l *haLayout) cluster() string {
	var members []string
	for _, m := range l.Members {
		members = append(members, fmt.Sprintf("%s=https://127.0.0.1:%d", m.Name, m.Peer))
	}
	return strings.Join(members, ",")
}
