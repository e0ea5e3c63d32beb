package kubestorage_test

import (
	"fmt"
	"math/rand/v2"
	"strconv"
)

// simAction is what one step does.
type simAction int

const (
	doWrite    simAction = iota // through a server
	doTxn                       // several keys in one revision, in etcd
	doGet                       //
	doList                      //
	doPage                      // the next page of an earlier list
	doWatch                     // a new watch
	doResume                    // end a watch, and go on from its last revision
	doEndWatch                  // end a watch
	doPause                     // a client does not read its watch, or reads it again
	doDeliver                   // events to a server
	doProgress                  // the answer to a request for progress
	doAnswer                    // the answer to a request to etcd
	doCalm                      // a server gets all answers at once from now on, or no longer
	doMove                      // requests of a server go to another member
	doEnd                       // the watch of a server ends
	doFail                      // requests of a server fail, or no longer
	doLag                       // a member applies the log late from now on, or at once
	doApply                     // a member applies a part of the log
	doCutOff                    // a member reaches no other from now on, or all do
	doElect                     // another leader
	doForget                    // the keys of continue tokens are deleted
	doCompact                   //
	doRestore                   // etcd from a backup
	doRestart                   // a server ends, and another process starts
	doSleep                     // time passes
	actions
)

var actionWeights = [actions]int{
	doWrite: 200, doTxn: 40, doGet: 100, doList: 100, doPage: 60, doWatch: 24, doResume: 24, doEndWatch: 8, doPause: 16,
	doDeliver: 200, doProgress: 60, doAnswer: 200, doCalm: 30, doMove: 20, doEnd: 12, doFail: 6,
	doLag: 30, doApply: 100, doCutOff: 8, doElect: 8, doForget: 1, doCompact: 8, doRestore: 1, doRestart: 6, doSleep: 40,
}

// actionNames are the names of actions in files.
var actionNames = [actions]string{
	doWrite: "write", doTxn: "txn", doGet: "get", doList: "list", doPage: "page",
	doWatch: "watch", doResume: "resume", doEndWatch: "end-watch", doPause: "pause", doDeliver: "deliver",
	doProgress: "progress", doAnswer: "answer", doCalm: "calm", doMove: "move", doEnd: "end",
	doFail: "fail", doLag: "lag", doApply: "apply", doCutOff: "cut-off", doElect: "elect",
	doForget: "forget", doCompact: "compact", doRestore: "restore", doRestart: "restart", doSleep: "sleep",
}

func (a simAction) String() string { return actionNames[a] }

// simOp is one step. The draws of a step come from its own seed, and choose among what exists then:
// any part of a list of steps is a run.
type simOp struct {
	Do   simAction
	Seed uint64
}

// simOps returns the n steps of a seed.
func simOps(seed uint64, n int) []simOp {
	rng, sum := rand.New(rand.NewPCG(seed, 1)), 0
	for _, w := range actionWeights {
		sum += w
	}
	ops := make([]simOp, n)
	for i := range ops {
		at := rng.IntN(sum)
		do := simAction(0)
		for ; at >= actionWeights[do]; do++ {
			at -= actionWeights[do]
		}
		ops[i] = simOp{do, rng.Uint64()}
	}
	return ops
}

// key draws a key: mostly one of a few, so that they meet.
func (s *sim) key(rng *rand.Rand) string {
	return fmt.Sprintf("ns%d/pod%d", rng.IntN(2), rng.IntN([]int{8, 8, s.names}[rng.IntN(3)]))
}

func simSelect(rng *rand.Rand) (x simSelector) {
	switch rng.IntN(8) {
	case 0:
		x.Namespace = "ns0"
	case 1:
		x.Tier = "t1"
	case 2:
		x.Node = "n1"
	case 3:
		x.Node, x.Namespace = "n2", "ns1"
	case 4:
		x.Tier, x.Node = "t0", "n0"
	case 5:
		x.Name = "pod3"
	}
	return x
}

// revision draws a resource version of a read.
func (s *sim) revision(rng *rand.Rand) string {
	now := s.etcd.Revision()
	rev := int64(0)
	switch rng.IntN(8) {
	case 0, 1, 2:
		return ""
	case 3:
		return "0"
	case 4:
		rev = now
	case 5:
		rev = s.etcd.compacted + int64(rng.IntN(4)) - 1
	case 6:
		rev = now - int64(rng.IntN(30))
	case 7:
		rev = now + int64(rng.IntN(2))
	}
	return strconv.FormatInt(max(rev, 1), 10)
}

func simTier(rng *rand.Rand) string { return fmt.Sprintf("t%d", rng.IntN(3)) }

func simNode(rng *rand.Rand) string { return fmt.Sprintf("n%d", rng.IntN(3)) }
