package handlerchain

import (
	"context"
	"net/http"
	"sync"

	flowcontrol "k8s.io/api/flowcontrol/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericapiserver "k8s.io/apiserver/pkg/server"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/apiserver/pkg/util/flowcontrol/fairqueuing"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"

	"github.com/stratakube/strata/kube/listadmission"
)

// Levels maps the UIDs of priority levels to the levels of lists. Priority and fairness exposes
// only the UID to a handler, in a response header; Levels records the level during classification.
// Safe for concurrent use.
type Levels struct {
	utilflowcontrol.Interface
	byUID sync.Map // of listadmission.Level
}

// levelHeader is the canonical key of that header.
var levelHeader = http.CanonicalHeaderKey(flowcontrol.ResponseHeaderMatchedPriorityLevelConfigurationUID)

// WatchLevels installs a Levels as c.FlowControl and returns it; nil without priority and fairness.
func WatchLevels(c *genericapiserver.Config) *Levels {
	if c.FlowControl == nil {
		return nil
	}
	if l, ok := c.FlowControl.(*Levels); ok {
		return l
	}
	l := &Levels{Interface: c.FlowControl}
	c.FlowControl = l
	return l
}

// Handle implements utilflowcontrol.Interface.
func (l *Levels) Handle(ctx context.Context, digest utilflowcontrol.RequestDigest,
	note func(*flowcontrol.FlowSchema, *flowcontrol.PriorityLevelConfiguration, string),
	estimate func() flowcontrolrequest.WorkEstimate, queueNote fairqueuing.QueueNoteFn, exec func()) {
	if info := digest.RequestInfo; info != nil && info.Verb == "list" {
		inner := note
		note = func(fs *flowcontrol.FlowSchema, pl *flowcontrol.PriorityLevelConfiguration, flow string) {
			l.note(pl)
			inner(fs, pl, flow)
		}
	}
	l.Interface.Handle(ctx, digest, note, estimate, queueNote, exec)
}

func (l *Levels) note(pl *flowcontrol.PriorityLevelConfiguration) {
	if pl.UID == "" { // synthesized while priority and fairness has no configuration
		return
	}
	level := listadmission.Level{Name: pl.Name, Exempt: pl.Spec.Type == flowcontrol.PriorityLevelEnablementExempt}
	if known, ok := l.byUID.Load(string(pl.UID)); !ok || known != level {
		l.byUID.Store(string(pl.UID), level)
	}
}

// Of returns the level of a list that priority and fairness admitted. Without priority and
// fairness, and so for a nil Levels, all users share one level, except system:masters, which
// upstream's max-in-flight limit exempts too.
func (l *Levels) Of(w http.ResponseWriter, req *http.Request) listadmission.Level {
	if uid := w.Header()[levelHeader]; l != nil && len(uid) > 0 {
		if level, ok := l.byUID.Load(uid[0]); ok {
			return level.(listadmission.Level)
		}
	}
	if u, ok := request.UserFrom(req.Context()); ok {
		for _, group := range u.GetGroups() {
			if group == user.SystemPrivilegedGroup {
				return listadmission.Level{Exempt: true}
			}
		}
	}
	return listadmission.Level{}
}
