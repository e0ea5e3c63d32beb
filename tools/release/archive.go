package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"fmt"
	"path"
	"slices"
	"time"
)

// file is a file of an archive.
type file struct {
	path    string // relative, with slashes
	content []byte
	mode    int64
}

// pack returns a compressed tar archive of the files below a directory. Its bytes depend on the
// arguments only: entries are sorted, belong to root, and have the time at. Errors: two files have
// the same path.
func pack(dir string, files []file, at time.Time) ([]byte, error) {
	var out bytes.Buffer
	// without a name and a time in its header
	compressed, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	archive := tar.NewWriter(compressed)
	files = slices.SortedFunc(slices.Values(files), func(a, b file) int { return cmp.Compare(a.path, b.path) })
	made := map[string]bool{}
	for i, f := range files {
		if i > 0 && files[i-1].path == f.path {
			return nil, fmt.Errorf("two files have the path %s", f.path)
		}
		full := path.Join(dir, f.path)
		var parents []string
		for parent := path.Dir(full); parent != "." && !made[parent]; parent = path.Dir(parent) {
			made[parent] = true
			parents = append(parents, parent)
		}
		for _, parent := range slices.Backward(parents) {
			if err := archive.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: parent + "/", Mode: 0o755, ModTime: at, Format: tar.FormatPAX}); err != nil {
				return nil, err
			}
		}
		header := &tar.Header{Typeflag: tar.TypeReg, Name: full, Mode: f.mode, Size: int64(len(f.content)), ModTime: at, Format: tar.FormatPAX}
		if err := archive.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := archive.Write(f.content); err != nil {
			return nil, err
		}
	}
	if err := archive.Close(); err != nil {
		return nil, err
	}
	if err := compressed.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
