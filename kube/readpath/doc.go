// Package readpath answers GET, LIST and WATCH with bytes that are kept beside the
// entries of the engine, behind an API server's authentication, authorization,
// audit and priority and fairness, and in front of its own handlers.
//
// Whatever it does not know (tables, subresources, other media types, resources
// that memory does not hold) it passes on to those handlers, and counts.
package readpath
