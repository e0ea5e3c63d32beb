// Package useragent names the programs whose code strata up runs. The API server names a field manager after the part of the user agent
// before the first slash, which client-go sets to the name of the process: without another name, every controller would be "strata" in
// metadata.managedFields and in the output of `strata history log`.
package useragent

import "strings"

// As returns a user agent of client-go with the name of another program: "strata/v1 (linux/amd64)" as "kwok" is "kwok/v1 (linux/amd64)".
func As(program, agent string) string {
	_, rest, _ := strings.Cut(agent, "/")
	return program + "/" + rest
}
