// Package slowclient ends responses whose clients do not read them: at a deadline
// (WithWriteDeadline), below a minimum rate (Pace), or on demand (Cutoff). It can close the
// connection of a client that reads nothing at all (Listener).
package slowclient
