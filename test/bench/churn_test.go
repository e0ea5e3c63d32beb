package main

import "testing"

func TestChurnVerify_WrongPastRead_ReturnsError(t *testing.T) {
	for _, c := range []struct {
		name string
		seen seenPast
		ok   bool
	}{
		{"before the first write", seenPast{at: 10, name: "a", version: 3}, true},
		{"never written", seenPast{at: 19, name: "b", version: 3}, true},
		{"at a write", seenPast{at: 12, name: "a", version: 12}, true},
		{"between two", seenPast{at: 14, name: "a", version: 12}, true},
		{"after the last", seenPast{at: 20, name: "a", version: 15}, true},
		{"newer than requested", seenPast{at: 14, name: "a", version: 15}, false},
		{"older than requested", seenPast{at: 15, name: "a", version: 12}, false},
		{"from before the first write", seenPast{at: 14, name: "a", version: 3}, false},
		{"newer than requested, before the first write", seenPast{at: 11, name: "a", version: 12}, false},
	} {
		written := churn{began: 10, of: map[string][]int64{"a": {15, 12}}, seen: []seenPast{c.seen}} // writes end in any order
		if err := written.verify(); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}
