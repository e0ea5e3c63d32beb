package main

import (
	"strings"
	"testing"
)

func TestWriteProfiles_FormatsMarkdown(t *testing.T) {
	var b strings.Builder
	err := writeProfiles(&b, []Profile{{
		Workload: "LIST all", Engine: "strata",
		Top: "File: strata\nBuild ID: 12\nType: cpu\nTime: now\nDuration: 2s, Total samples = 1s (50%)\n      flat  flat%\n     0.5s 50% main.f: it\n",
	}})
	const want = "### LIST all: strata\n\n```\nDuration: 2s, Total samples = 1s (50%)\n      flat  flat%\n     0.5s 50% main.f: it\n```\n\n"
	if err != nil || b.String() != want {
		t.Errorf("got %v\n%s\nwant\n%s", err, b.String(), want)
	}
}
