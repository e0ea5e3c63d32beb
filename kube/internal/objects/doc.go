// Package objects decodes stored values and caches the derived data: attributes for selectors,
// decoded and converted objects, objects of events.
//
// A View is one served version of one resource. Derived data belongs to a Generation, which is
// defined by the keys that decrypt values. An object is decoded when the first reader needs it, and
// readers of different entries never wait for each other (I9).
package objects
