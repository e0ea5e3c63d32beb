package up

import (
	"fmt"
	"path/filepath"
	"text/tabwriter"

	"github.com/stratakube/strata/server/internal/datadir"
	"github.com/stratakube/strata/server/internal/supervise"
)

// showEvent prints the events of a process after its first start, which the steps of the start
// show.
func (p *haControlPlane) showEvent(e supervise.Event) {
	switch {
	case e.State == supervise.Ended && e.Pause > 0:
		p.show.step("%s: process %d ended (%v); starts again in %v", e.Name, e.PID, e.Err, e.Pause)
	case e.State == supervise.Started && e.Life > 1:
		p.show.step("%s: started, process %d", e.Name, e.PID)
	case e.State == supervise.Ready && e.Life > 1:
		p.show.step("%s: ready, process %d", e.Name, e.PID)
	}
}

// showHealth prints changes of the health of a backend.
func (p *haControlPlane) showHealth(name string, reason error) {
	if reason != nil {
		p.show.step("balancer: no new connections to %s (%v)", name, reason)
	} else {
		p.show.step("balancer: %s gets connections", name)
	}
}

// printHA prints the table of processes and the next commands.
func (p *haControlPlane) printHA(servers, replicas string) {
	fmt.Fprintf(p.out, "\nStrata is up, in %d processes; press Ctrl-C to stop all of them. Logs and process ids are in %s:\n\n",
		len(p.layout.all())+1, p.dir.HA())
	table := tabwriter.NewWriter(p.out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "  NAME\tPROCESS\tADDRESS\tLOG")
	pids := map[string]int{}
	p.mu.Lock()
	for _, program := range p.mu.programs {
		pids[program.Name()] = program.PID()
	}
	p.mu.Unlock()
	for _, each := range p.layout.all() {
		fmt.Fprintf(table, "  %s\t%d\t%s\t%s\n", each.Name, pids[each.Name], each.url(), filepath.Base(supervise.LogPath(p.dir.HA(), each.Name)))
	}
	fmt.Fprintf(table, "  balancer\t%s\t%s\t%s\n", "this one", servers, "../"+filepath.Base(p.dir.Log()))
	if replicas != "" {
		fmt.Fprintf(table, "  \t\t%s\t%s\n", replicas, "reads by the replicas")
	}
	_ = table.Flush() // to the terminal, like every other line

	kubectl := p.kubectl(p.dir)
	fmt.Fprintf(p.out, `
In another terminal, watch an object, end any process, and change the object:

  %s create configmap greeting --from-literal=hello=world
  %s get configmap greeting --watch --output-watch-events &
  kill -9 $(cat %s)
  %s patch configmap greeting --patch='{"data":{"hello":"moon"}}'
`, kubectl, kubectl, quote(supervise.PIDPath(p.relativeHA(), p.layout.Servers[0].Name)), kubectl)
	if replicas != "" {
		fmt.Fprintf(p.out, "  %s --context=%s get configmap greeting    # by a replica\n", kubectl, replicasContextName)
	}
	fmt.Fprintf(p.out, "  export KUBECONFIG=%s    # for other Kubernetes clients\n\n", quote(p.dir.Kubeconfig()))
}

// relativeHA returns the path of the directory of processes, relative if the data directory is the
// default one.
func (p *haControlPlane) relativeHA() string {
	if isDefault(p.dir) {
		return filepath.Join(datadir.Default(func(string) string { return "" }), filepath.Base(p.dir.HA()))
	}
	return p.dir.HA()
}
