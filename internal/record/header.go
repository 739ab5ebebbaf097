package record

// The headers that describe a record, apart from the type of its event. The relay reads no others.
const (
	HeaderID          = "id"                   // of the envelope
	HeaderIDType      = "outrelay-id-type"     // "string" for an id that is a string and looks like another type
	HeaderNamespace   = "outrelay-ns"          // a digest of the envelope's collection, if there may be several
	HeaderDelivery    = "outrelay-delivery"    // the number of a replay, from the second delivery on
	HeaderRedelivered = "outrelay-redelivered" // "true": it may have been delivered before
	HeaderOnly        = "outrelay-only"        // group/handler that a requeued letter is for
)

// Header returns the value of the first header with the given name; nil if there is none.
func (r *Record) Header(name string) []byte {
	for i := range r.Headers {
		if string(r.Headers[i].Key) == name {
			return r.Headers[i].Value
		}
	}
	return nil
}
