// Package handlerchain builds the handlers of an API server in which plain reads (get, list and
// watch of a resource, without subresource) take a shorter chain of filters. Authentication,
// authorization, audit, priority and fairness and metrics have the same results as in upstream's
// chain; everything else takes upstream's own chain (New). It also gives priority and fairness the
// size of reads (CostFunc), and makes the priority level of a list known to its handler (Levels).
package handlerchain
