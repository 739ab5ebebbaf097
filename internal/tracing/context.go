package tracing

import (
	"bytes"
	"encoding/hex"

	"go.opentelemetry.io/otel/trace"

	"github.com/outrelay/outrelay/internal/record"
)

// Context is the trace context that the appending service left in the headers of a record.
type Context struct {
	TraceID trace.TraceID
	SpanID  trace.SpanID
	state   []byte // tracestate; aliases the record
}

var (
	parentHeader = []byte("traceparent")
	stateHeader  = []byte("tracestate")
)

// Stored finds the trace context in headers, as W3C has it. ok is false without a valid one that the service sampled. It
// allocates nothing; where a name repeats, the first counts.
func Stored(headers []record.Header) (c Context, ok bool) {
	for i := range headers {
		if len(headers[i].Key) != len(parentHeader) || !bytes.EqualFold(headers[i].Key, parentHeader) {
			continue
		}
		if c, ok = parseTraceparent(headers[i].Value); !ok {
			return Context{}, false
		}
		for j := range headers {
			if len(headers[j].Key) == len(stateHeader) && bytes.EqualFold(headers[j].Key, stateHeader) {
				c.state = headers[j].Value
				break
			}
		}
		return c, true
	}
	return Context{}, false
}

// parseTraceparent reads version-traceid-spanid-flags. Later versions may be longer; the parts that are known stay where they are.
func parseTraceparent(v []byte) (c Context, ok bool) {
	const size = 55
	if len(v) < size || v[2] != '-' || v[35] != '-' || v[52] != '-' || len(v) > size && v[size] != '-' {
		return c, false
	}
	var version, flags [1]byte
	if !isLowerCase(v[:size]) || !decodeHex(version[:], v[:2]) || version[0] == 0xff || version[0] == 0 && len(v) != size {
		return c, false
	}
	if !decodeHex(c.TraceID[:], v[3:35]) || !decodeHex(c.SpanID[:], v[36:52]) || !decodeHex(flags[:], v[53:55]) {
		return Context{}, false
	}
	return c, c.TraceID.IsValid() && c.SpanID.IsValid() && flags[0]&byte(trace.FlagsSampled) != 0
}

func decodeHex(dst, src []byte) bool {
	_, err := hex.Decode(dst, src)
	return err == nil
}

// isLowerCase reports whether v has no capitals, which W3C does not allow.
func isLowerCase(v []byte) bool {
	for _, b := range v {
		if b >= 'A' && b <= 'Z' {
			return false
		}
	}
	return true
}

// spanContext is the context as a link refers to it.
func (c Context) spanContext() trace.SpanContext {
	state, err := trace.ParseTraceState(string(c.state))
	if err != nil {
		state = trace.TraceState{} // of a link it is an extra
	}
	return trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: c.TraceID, SpanID: c.SpanID, TraceFlags: trace.FlagsSampled, TraceState: state, Remote: true,
	})
}
