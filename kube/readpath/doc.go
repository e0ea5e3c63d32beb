// Package readpath answers GET, LIST and WATCH with encoded bytes that the engine caches beside its
// entries. Its handler runs after an API server's authentication, authorization, audit and priority
// and fairness filters, and before the server's own handlers.
//
// Requests it does not support (subresources, other media types, resources that are not cached) are
// passed on to those handlers and counted.
package readpath
