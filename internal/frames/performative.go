package frames

// The performatives (AMQP 1.0, part 2.7), what is in them (2.8, 3.4 and 3.5), and the
// bodies of SASL's frames (5.3). A field that may be absent is an Optional where its
// zero value means something else than its absence.

// Role is which end of a link: false for the sender, true for the receiver.
const (
	RoleSender   = false
	RoleReceiver = true
)

// The codes of the performatives' descriptors.
const (
	codeOpen        = 0x10
	codeBegin       = 0x11
	codeAttach      = 0x12
	codeFlow        = 0x13
	codeTransfer    = 0x14
	codeDisposition = 0x15
	codeDetach      = 0x16
	codeEnd         = 0x17
	codeClose       = 0x18
	codeAccepted    = 0x24
	codeReleased    = 0x26
	codeModified    = 0x27
)

// Open negotiates the parameters of a connection.
type Open struct {
	ContainerID         string
	Hostname            string
	MaxFrameSize        Optional[uint32] // absent: unlimited
	ChannelMax          Optional[uint16] // absent: 65535
	IdleTimeout         Optional[uint32] // in milliseconds
	OutgoingLocales     []Symbol
	IncomingLocales     []Symbol
	OfferedCapabilities []Symbol
	DesiredCapabilities []Symbol
	Properties          Map
}

func (*Open) kind() (uint64, string) { return codeOpen, "open" }
func (p *Open) walk(f *fields) {
	required(f, &p.ContainerID)
	orZero(f, &p.Hostname)
	optional(f, &p.MaxFrameSize)
	optional(f, &p.ChannelMax)
	optional(f, &p.IdleTimeout)
	symbols(f, &p.OutgoingLocales)
	symbols(f, &p.IncomingLocales)
	symbols(f, &p.OfferedCapabilities)
	symbols(f, &p.DesiredCapabilities)
	orNil(f, &p.Properties)
}

// Begin begins a session on a channel.
type Begin struct {
	RemoteChannel       Optional[uint16] // absent: this end has begun it
	NextOutgoingID      uint32
	IncomingWindow      uint32
	OutgoingWindow      uint32
	HandleMax           Optional[uint32] // absent: 4294967295
	OfferedCapabilities []Symbol
	DesiredCapabilities []Symbol
	Properties          Map
}

func (*Begin) kind() (uint64, string) { return codeBegin, "begin" }
func (p *Begin) walk(f *fields) {
	optional(f, &p.RemoteChannel)
	required(f, &p.NextOutgoingID)
	required(f, &p.IncomingWindow)
	required(f, &p.OutgoingWindow)
	optional(f, &p.HandleMax)
	symbols(f, &p.OfferedCapabilities)
	symbols(f, &p.DesiredCapabilities)
	orNil(f, &p.Properties)
}

// Attach attaches a link to a session.
type Attach struct {
	Name                 string
	Handle               uint32
	Role                 bool
	SenderSettleMode     Optional[uint8] // absent: 2, mixed
	ReceiverSettleMode   Optional[uint8] // absent: 0, first
	Source               *Source
	Target               any // a *Target, or a Described, such as a coordinator
	Unsettled            Map
	IncompleteUnsettled  bool
	InitialDeliveryCount Optional[uint32]
	MaxMessageSize       Optional[uint64]
	OfferedCapabilities  []Symbol
	DesiredCapabilities  []Symbol
	Properties           Map
}

func (*Attach) kind() (uint64, string) { return codeAttach, "attach" }
func (p *Attach) walk(f *fields) {
	required(f, &p.Name)
	required(f, &p.Handle)
	required(f, &p.Role)
	optional(f, &p.SenderSettleMode)
	optional(f, &p.ReceiverSettleMode)
	child(f, &p.Source)
	children(f, &p.Target)
	orNil(f, &p.Unsettled)
	orZero(f, &p.IncompleteUnsettled)
	optional(f, &p.InitialDeliveryCount)
	optional(f, &p.MaxMessageSize)
	symbols(f, &p.OfferedCapabilities)
	symbols(f, &p.DesiredCapabilities)
	orNil(f, &p.Properties)
}

// Flow updates the windows of a session and the credit of a link.
type Flow struct {
	NextIncomingID Optional[uint32]
	IncomingWindow uint32
	NextOutgoingID uint32
	OutgoingWindow uint32
	Handle         Optional[uint32] // absent: the session's alone
	DeliveryCount  Optional[uint32]
	LinkCredit     Optional[uint32]
	Available      Optional[uint32]
	Drain          bool
	Echo           bool
	Properties     Map
}

func (*Flow) kind() (uint64, string) { return codeFlow, "flow" }
func (p *Flow) walk(f *fields) {
	optional(f, &p.NextIncomingID)
	required(f, &p.IncomingWindow)
	required(f, &p.NextOutgoingID)
	required(f, &p.OutgoingWindow)
	optional(f, &p.Handle)
	optional(f, &p.DeliveryCount)
	optional(f, &p.LinkCredit)
	optional(f, &p.Available)
	orZero(f, &p.Drain)
	orZero(f, &p.Echo)
	orNil(f, &p.Properties)
}

// Transfer carries a message, or a part of one, in the payload of its frame.
type Transfer struct {
	Handle             uint32
	DeliveryID         Optional[uint32] // absent: it continues the last delivery
	DeliveryTag        []byte
	MessageFormat      Optional[uint32]
	Settled            Optional[bool]
	More               bool
	ReceiverSettleMode Optional[uint8]
	State              any // a delivery state
	Resume             bool
	Aborted            bool
	Batchable          bool
}

func (*Transfer) kind() (uint64, string) { return codeTransfer, "transfer" }
func (p *Transfer) walk(f *fields) {
	required(f, &p.Handle)
	optional(f, &p.DeliveryID)
	orNil(f, &p.DeliveryTag)
	optional(f, &p.MessageFormat)
	optional(f, &p.Settled)
	orZero(f, &p.More)
	optional(f, &p.ReceiverSettleMode)
	children(f, &p.State)
	orZero(f, &p.Resume)
	orZero(f, &p.Aborted)
	orZero(f, &p.Batchable)
}

// Disposition carries the state of deliveries.
type Disposition struct {
	Role      bool
	First     uint32
	Last      Optional[uint32] // absent: First
	Settled   Optional[bool]   // absent: false. RabbitMQ's session crashes over an absent one.
	State     any              // a delivery state
	Batchable bool
}

func (*Disposition) kind() (uint64, string) { return codeDisposition, "disposition" }
func (p *Disposition) walk(f *fields) {
	required(f, &p.Role)
	required(f, &p.First)
	optional(f, &p.Last)
	optional(f, &p.Settled)
	children(f, &p.State)
	orZero(f, &p.Batchable)
}

// Detach detaches a link.
type Detach struct {
	Handle uint32
	Closed bool
	Error  *Error
}

func (*Detach) kind() (uint64, string) { return codeDetach, "detach" }
func (p *Detach) walk(f *fields) {
	required(f, &p.Handle)
	orZero(f, &p.Closed)
	child(f, &p.Error)
}

// End ends a session.
type End struct{ Error *Error }

func (*End) kind() (uint64, string) { return codeEnd, "end" }
func (p *End) walk(f *fields)       { child(f, &p.Error) }

// Close ends a connection.
type Close struct{ Error *Error }

func (*Close) kind() (uint64, string) { return codeClose, "close" }
func (p *Close) walk(f *fields)       { child(f, &p.Error) }

// Error says why something was refused or has ended.
type Error struct {
	Condition   Symbol // "amqp:not-found"
	Description string
	Info        Map
}

func (*Error) kind() (uint64, string) { return 0x1d, "error" }
func (p *Error) walk(f *fields) {
	required(f, &p.Condition)
	orZero(f, &p.Description)
	orNil(f, &p.Info)
}

// Error has condition and description.
func (p *Error) Error() string {
	if p.Description == "" {
		return string(p.Condition)
	}
	return string(p.Condition) + ": " + p.Description
}

// Source is where a link's messages come from.
type Source struct {
	Address               any // RabbitMQ's are strings
	Durable               Optional[uint32]
	ExpiryPolicy          Symbol
	Timeout               Optional[uint32] // in seconds
	Dynamic               bool
	DynamicNodeProperties Map
	DistributionMode      Symbol
	Filter                Map
	DefaultOutcome        any // a delivery state
	Outcomes              []Symbol
	Capabilities          []Symbol
}

func (*Source) kind() (uint64, string) { return 0x28, "source" }
func (p *Source) walk(f *fields) {
	anything(f, &p.Address)
	optional(f, &p.Durable)
	orZero(f, &p.ExpiryPolicy)
	optional(f, &p.Timeout)
	orZero(f, &p.Dynamic)
	orNil(f, &p.DynamicNodeProperties)
	orZero(f, &p.DistributionMode)
	orNil(f, &p.Filter)
	children(f, &p.DefaultOutcome)
	symbols(f, &p.Outcomes)
	symbols(f, &p.Capabilities)
}

// Target is where a link's messages go to.
type Target struct {
	Address               any              // RabbitMQ's are strings, or absent
	Durable               Optional[uint32] // 0 none, 1 configuration, 2 unsettled state
	ExpiryPolicy          Symbol
	Timeout               Optional[uint32] // in seconds
	Dynamic               bool
	DynamicNodeProperties Map
	Capabilities          []Symbol
}

func (*Target) kind() (uint64, string) { return 0x29, "target" }
func (p *Target) walk(f *fields) {
	anything(f, &p.Address)
	optional(f, &p.Durable)
	orZero(f, &p.ExpiryPolicy)
	optional(f, &p.Timeout)
	orZero(f, &p.Dynamic)
	orNil(f, &p.DynamicNodeProperties)
	symbols(f, &p.Capabilities)
}

// The delivery states. All but Received are outcomes.
type (
	// Received says how much of a delivery has arrived.
	Received struct {
		SectionNumber uint32
		SectionOffset uint64
	}
	// Accepted says that the message was taken.
	Accepted struct{}
	// Rejected says that the message can't be processed.
	Rejected struct{ Error *Error }
	// Released says that the message was not processed.
	Released struct{}
	// Modified says that the message was not processed, and changes it.
	Modified struct {
		DeliveryFailed    bool
		UndeliverableHere bool
		Annotations       Map
	}
)

func (*Received) kind() (uint64, string) { return 0x23, "received" }
func (p *Received) walk(f *fields) {
	required(f, &p.SectionNumber)
	required(f, &p.SectionOffset)
}

func (*Accepted) kind() (uint64, string) { return codeAccepted, "accepted" }
func (*Accepted) walk(*fields)           {}

func (*Rejected) kind() (uint64, string) { return 0x25, "rejected" }
func (p *Rejected) walk(f *fields)       { child(f, &p.Error) }

func (*Released) kind() (uint64, string) { return codeReleased, "released" }
func (*Released) walk(*fields)           {}

func (*Modified) kind() (uint64, string) { return codeModified, "modified" }
func (p *Modified) walk(f *fields) {
	orZero(f, &p.DeliveryFailed)
	orZero(f, &p.UndeliverableHere)
	orNil(f, &p.Annotations)
}

// The bodies of SASL's frames.
type (
	// Mechanisms is what the server offers.
	Mechanisms struct{ Mechanisms []Symbol }
	// Init is what the client chooses.
	Init struct {
		Mechanism       Symbol
		InitialResponse []byte
		Hostname        string
	}
	// Challenge is a step of the server's.
	Challenge struct{ Challenge []byte }
	// Response is the client's answer to a Challenge.
	Response struct{ Response []byte }
	// Outcome ends the dialogue: 0 is ok, 1 a failed authentication, and 2 to 4
	// failures of the server.
	Outcome struct {
		Code           uint8
		AdditionalData []byte
	}
)

func (*Mechanisms) kind() (uint64, string) { return 0x40, "sasl-mechanisms" }
func (p *Mechanisms) walk(f *fields)       { symbols(f, &p.Mechanisms) }

func (*Init) kind() (uint64, string) { return 0x41, "sasl-init" }
func (p *Init) walk(f *fields) {
	required(f, &p.Mechanism)
	orNil(f, &p.InitialResponse)
	orZero(f, &p.Hostname)
}

func (*Challenge) kind() (uint64, string) { return 0x42, "sasl-challenge" }
func (p *Challenge) walk(f *fields)       { required(f, &p.Challenge) }

func (*Response) kind() (uint64, string) { return 0x43, "sasl-response" }
func (p *Response) walk(f *fields)       { required(f, &p.Response) }

func (*Outcome) kind() (uint64, string) { return 0x44, "sasl-outcome" }
func (p *Outcome) walk(f *fields) {
	required(f, &p.Code)
	orNil(f, &p.AdditionalData)
}
