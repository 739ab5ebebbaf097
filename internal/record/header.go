package record

// The headers that say what a record is, beside the type of its event. No others are read by the relay.
const (
	HeaderID          = "id"                   // of the envelope
	HeaderIDType      = "outrelay-id-type"     // "string" for an id that is a string and reads like another type
	HeaderNamespace   = "outrelay-ns"          // a digest of the envelope's collection, where there may be several
	HeaderDelivery    = "outrelay-delivery"    // the number of a replay, from the second delivery on
	HeaderRedelivered = "outrelay-redelivered" // "true": it may have been delivered before
	HeaderOnly        = "outrelay-only"        // group/handler that a requeued letter is for
)

// Header returns the value of the first header of a name; nil if there is none.
func (r *Record) Header(name string) []byte {
	for i := range r.Headers {
		if string(r.Headers[i].Key) == name {
			return r.Headers[i].Value
		}
	}
	return nil
}
