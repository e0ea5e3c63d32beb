// Package gzipjoin joins separately compressed runs of bytes into one gzip member, so that a run is
// compressed once and sent many times, in different members:
//
//	header │ run │ loose bytes │ run │ run │ ... │ loose bytes │ empty final block, CRC-32, length
//
// This is valid because:
//
//	J1  a run refers to no byte before it: its window is fresh.
//	J2  a run consists of whole blocks, none of them final, and ends at a byte
//	    boundary: with the empty stored block of a sync flush.
//	J3  the CRC-32 of a concatenation follows from those of its parts and the
//	    length of the second (combine).
//
// Several members in one body would need none of this, but common clients stop after the first.
//
// # Size
//
// A fresh window costs about 150 bytes per run: a new Huffman code, and a first object without an
// earlier one to refer to. On lists of API objects, cut into runs of 21 to 64 objects, the result
// is at most 5% larger (mostly smaller) than that of compress/gzip for the whole list at level 1,
// if only runs that are WorthApart are compressed on their own, and the others given to
// Writer.Write, which gathers them. TestCompress_JoinedLeaves_AreNearStandardSize checks this for
// several kinds of lists, in JSON and protobuf.
package gzipjoin
