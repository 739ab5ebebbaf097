package tracing

import (
	"bytes"
	"encoding/hex"

	"go.opentelemetry.io/otel/trace"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// storedContext is the trace context that the service stored in the headers of a record.
type storedContext struct {
	TraceID trace.TraceID
	SpanID  trace.SpanID
	state   []byte // tracestate; a subslice of the record
}

var (
	parentHeader = []byte("traceparent")
	stateHeader  = []byte("tracestate")
)

// fromHeaders returns the W3C trace context in headers. ok is false if there is no valid one, or the service did not
// sample it. If a header occurs several times, the first one counts. Stored does not allocate.
func fromHeaders(headers []record.Header) (context storedContext, ok bool) {
	for i := range headers {
		if len(headers[i].Key) != len(parentHeader) || !bytes.EqualFold(headers[i].Key, parentHeader) {
			continue
		}

		context, ok = parseTraceparent(headers[i].Value)
		if !ok {
			return storedContext{}, false
		}
		for j := range headers {
			if len(headers[j].Key) == len(stateHeader) && bytes.EqualFold(headers[j].Key, stateHeader) {
				context.state = headers[j].Value
				break
			}
		}
		return context, true
	}
	return storedContext{}, false
}

// parseTraceparent parses version-traceid-spanid-flags. Later versions may be longer, but have these four parts
// at the same places.
func parseTraceparent(value []byte) (context storedContext, ok bool) {
	const size = 55
	if len(value) < size || value[2] != '-' || value[35] != '-' || value[52] != '-' || len(value) > size && value[size] != '-' {
		return context, false
	}

	var version, flags [1]byte
	if !isLowerCase(value[:size]) || !decodeHex(version[:], value[:2]) {
		return context, false
	}
	if version[0] == 0xff || version[0] == 0 && len(value) != size {
		return context, false
	}

	if !decodeHex(context.TraceID[:], value[3:35]) || !decodeHex(context.SpanID[:], value[36:52]) || !decodeHex(flags[:], value[53:55]) {
		return storedContext{}, false
	}
	return context, context.TraceID.IsValid() && context.SpanID.IsValid() && flags[0]&byte(trace.FlagsSampled) != 0
}

func decodeHex(dst, src []byte) bool {
	_, err := hex.Decode(dst, src)
	return err == nil
}

// isLowerCase reports whether value has no capital letters. W3C does not permit them.
func isLowerCase(value []byte) bool {
	for _, b := range value {
		if b >= 'A' && b <= 'Z' {
			return false
		}
	}
	return true
}

// spanContext returns the context as the target of a link.
func (c storedContext) spanContext() trace.SpanContext {
	state, err := trace.ParseTraceState(string(c.state))
	if err != nil {
		// A link works without the state.
		state = trace.TraceState{}
	}

	return trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: c.TraceID, SpanID: c.SpanID, TraceFlags: trace.FlagsSampled, TraceState: state, Remote: true,
	})
}
