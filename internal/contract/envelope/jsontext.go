package envelope

import (
	"bytes"
	"encoding/hex"
	"math"
	"strconv"
	"time"
	"unicode/utf8"
)

// maxDepth limits the nesting of documents, to protect the stack. It is larger than the limit of
// the server.
const maxDepth = 256

// appendTime appends a date in milliseconds since 1970: as a text if every reader can represent it,
// otherwise as a number.
func appendTime(dst []byte, ms int64) []byte {
	moment := time.UnixMilli(ms).UTC()
	if moment.Year() < 1970 || moment.Year() > 9999 {
		return append(strconv.AppendInt(append(dst, `{"$date":{"$numberLong":"`...), ms, 10), `"}}`...)
	}
	return append(moment.AppendFormat(append(dst, `{"$date":"`...), "2006-01-02T15:04:05.999Z07:00"), `"}`...)
}

// appendDouble appends a number. A whole number gets one decimal, so that readers treat it as a
// double.
func appendDouble(dst []byte, number float64) []byte {
	switch {
	case math.IsInf(number, 1):
		return append(dst, `{"$numberDouble":"Infinity"}`...)
	case math.IsInf(number, -1):
		return append(dst, `{"$numberDouble":"-Infinity"}`...)
	case math.IsNaN(number):
		return append(dst, `{"$numberDouble":"NaN"}`...)
	}

	// Without a point or an exponent, the number would be read as an integer.
	start := len(dst)
	dst = strconv.AppendFloat(dst, number, 'G', -1, 64)
	if !bytes.ContainsAny(dst[start:], "E.") {
		dst = append(dst, ".0"...)
	}

	return dst
}

// appendEscaped appends text as a part of a JSON string. Bytes that are not UTF-8 become the replacement
// character.
func appendEscaped(dst, text []byte) []byte {
	// text[start:i] was read, but not appended yet.
	start := 0
	for i := 0; i < len(text); {
		if char := text[i]; char < utf8.RuneSelf {
			if char < ' ' || char == '"' || char == '\\' {
				dst = appendEscape(append(dst, text[start:i]...), char)
				start = i + 1
			}
			i++
			continue
		}

		char, size := utf8.DecodeRune(text[i:])
		switch {
		case char == utf8.RuneError && size == 1:
			dst = append(append(dst, text[start:i]...), `\ufffd`...)
			start = i + size
			// JavaScript treats these two as line ends.
		case char == '\u2028' || char == '\u2029':
			dst = append(append(append(dst, text[start:i]...), `\u202`...), "89"[char-'\u2028'])
			start = i + size
		}

		i += size
	}

	return append(dst, text[start:]...)
}

// appendEscape appends the escape sequence of the character char.
func appendEscape(dst []byte, char byte) []byte {
	switch char {
	case '"', '\\':
		return append(dst, '\\', char)
	case '\n':
		return append(dst, `\n`...)
	case '\r':
		return append(dst, `\r`...)
	case '\t':
		return append(dst, `\t`...)
	case '\b':
		return append(dst, `\b`...)
	case '\f':
		return append(dst, `\f`...)
	}

	return hex.AppendEncode(append(dst, `\u00`...), []byte{char})
}
