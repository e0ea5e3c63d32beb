// Package objects turns stored values into objects and caches what is derived from them: attributes for selectors, decoded
// and converted objects, objects of events.
//
// A View is one served version of one resource. Derived data belongs to a Generation: to the keys with which values are
// decrypted. Nothing is decoded before a reader needs it, and readers of different entries never wait for each other (I9).
package objects
