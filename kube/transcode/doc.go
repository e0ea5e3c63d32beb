// Package transcode writes the JSON of built-in objects from their stored protobuf, without
// decoding them into Go structs. The result has the same bytes as upstream's path: decode, default,
// convert to the internal version and back, encode.
//
// Upstream's path changes some objects: those stored with unset defaults by an older release, or in
// another version. A Transcoder is therefore made with Rules: conditions on the fields of each
// message under which defaulting and conversion leave it as it is. An object that does not satisfy
// them, has an unexpected form, or has a field of an unsupported type is declined, and the caller
// decodes it. A declined object costs at most one scan of its bytes.
//
// A Custom does the same for custom resources, which are stored as JSON.
//
// An Abridger cuts stored objects down to the fields that selectors evaluate, so that decoding them
// costs little.
package transcode
