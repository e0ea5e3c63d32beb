package component

import "strings"

// UserAgent returns a user agent of client-go with the name of another program: "strata/v1
// (linux/amd64)" as "kwok" is "kwok/v1 (linux/amd64)". The API server names a field manager after
// the part before the first slash, which client-go sets to the name of the process. Without another
// name, each controller would be "strata" in metadata.managedFields and in the output of strata
// history log.
func UserAgent(program, agent string) string {
	_, rest, _ := strings.Cut(agent, "/")
	return program + "/" + rest
}
