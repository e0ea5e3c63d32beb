// Package uplot embeds the plot library uPlot (https://github.com/leeoniya/uPlot), as its npm
// package has it. `make console` copies the files from the version that package-lock.json names; a
// test compares them where npm is installed. LICENSE is part of the licences of a release, which
// are collected from the directories of linked packages.
package uplot

import "embed"

// Files are the module, its style sheet and its licence.
//
//go:embed uPlot.esm.js uPlot.min.css LICENSE
var Files embed.FS

// Version is that of the package.
const Version = "1.6.32"
