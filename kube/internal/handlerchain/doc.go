// Package handlerchain builds the handlers of an API server in which plain reads take a fast chain of filters. The filters
// decide and record as upstream's do; everything else takes upstream's own chain (New). It also gives priority and
// fairness the size of reads (CostFunc), and makes the priority level of a list known to its handler (Levels).
package handlerchain
