// Command recording runs commands of the tour (docs/tour.md) in a terminal and writes a recording
// of them: an animated SVG, without scripts, that a browser shows in a document.
//
//	recording -binary bin/strata -out docs/images/tour.svg
//
// Output, its time and its colors are those of the run. The recorder types the commands, and waits
// between them for the reader. The name of the temporary directory is replaced, and nothing else.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// step is a command of the recording.
type step struct {
	line  string
	until []string      // of a command in the background: the step ends when all were printed
	pause time.Duration // for the reader
}

// steps are the recording. The pauses sum up to less than loop.
var steps = []step{
	{line: "strata up --nodes 2 &", until: []string{"nodes: ready", "controllers: ready"}, pause: 1500 * time.Millisecond},
	{line: "strata kubectl create deployment hello --image=hello --replicas=3", pause: time.Second},
	{line: "strata kubectl get pods", pause: 2 * time.Second},
	{line: "strata kubectl delete deployment hello", pause: time.Second},
	{line: "strata kubectl get pods", pause: time.Second},
	{line: "strata history get pods --at 5s", pause: 1500 * time.Millisecond},
	{line: "strata history diff deployments --since 7s"},
}

const (
	loop     = 20 * time.Second      // of the recording
	lastRead = 2 * time.Second       // at least, from the last output to the end of the loop
	keyPress = 15 * time.Millisecond // between two characters of a command
	columns  = 104
	rows     = 27

	home = "/home/user/tour" // in place of the temporary directory
)

func main() {
	binary := flag.String("binary", "../bin/strata", "strata command to run")
	out := flag.String("out", "../docs/images/tour.svg", "file to write")
	flag.Parse()
	if err := run(*binary, *out); err != nil {
		fmt.Fprintln(os.Stderr, "recording:", err)
		os.Exit(1)
	}
}

func run(binary, out string) error {
	binary, err := filepath.Abs(binary)
	if err != nil {
		return err
	}
	if _, err := os.Stat(binary); err != nil {
		return fmt.Errorf("%w; make build writes it", err)
	}
	commands, end, err := record(binary, steps)
	if err != nil {
		return err
	}
	if end > loop-lastRead {
		return fmt.Errorf("the commands end after %s, and the recording is %s long; run it on a machine that is idle, or shorten the steps", end, loop)
	}
	image := picture{commands: commands, loop: loop, columns: columns, rows: rows}.svg()
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(out, image, 0o644); err != nil {
		return err
	}
	fmt.Printf("%s: %d bytes; the last output is at %.1f of %.0f s\n", out, len(image), end.Seconds(), loop.Seconds())
	return nil
}
