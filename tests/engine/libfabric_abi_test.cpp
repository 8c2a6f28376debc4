// Our declarations of libfabric against the system's own, where it has them.
#include "check.hpp"
#include "libfabric/abi.hpp"

#if __has_include(<rdma/fabric.h>)
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>

namespace abi = pipemorph::fabric_abi;

#define SAME(ours, our_field, theirs, their_field)                                   \
    static_assert(offsetof(abi::ours, our_field) == offsetof(theirs, their_field) && \
                  sizeof(abi::ours::our_field) == sizeof(theirs::their_field))
#define SAME_NAME(ours, theirs, field) SAME(ours, field, theirs, field)
#define SAME_VALUE(ours, theirs) \
    static_assert(static_cast<uint64_t>(abi::ours) == static_cast<uint64_t>(theirs))
#define SAME_SIZE(ours, theirs) static_assert(sizeof(abi::ours) == sizeof(theirs))

static_assert(abi::version(1, 17) == FI_VERSION(1, 17));
SAME_VALUE(kMsg, FI_MSG);
SAME_VALUE(kReceive, FI_RECV);
SAME_VALUE(kSend, FI_SEND);
SAME_VALUE(kTransmit, FI_TRANSMIT);
SAME_VALUE(kModeContext, FI_CONTEXT);
SAME_VALUE(kModeContext2, FI_CONTEXT2);
SAME_VALUE(kMrLocal, FI_MR_LOCAL);
SAME_VALUE(kMrVirtualAddress, FI_MR_VIRT_ADDR);
SAME_VALUE(kMrAllocated, FI_MR_ALLOCATED);
SAME_VALUE(kMrProviderKey, FI_MR_PROV_KEY);
SAME_VALUE(kAddressUnspecified, FI_ADDR_UNSPEC);
SAME_VALUE(kReliableDatagram, FI_EP_RDM);
SAME_VALUE(kThreadDomain, FI_THREAD_DOMAIN);
SAME_VALUE(kResourcesManaged, FI_RM_ENABLED);
SAME_VALUE(kAvTable, FI_AV_TABLE);
SAME_VALUE(kCqMessages, FI_CQ_FORMAT_MSG);
SAME_VALUE(kWaitNone, FI_WAIT_NONE);
SAME_VALUE(kWaitDescriptor, FI_WAIT_FD);
SAME_VALUE(kGetWait, FI_GETWAIT);
SAME_VALUE(kEnable, FI_ENABLE);
SAME_VALUE(kAgain, FI_EAGAIN);
SAME_VALUE(kTruncated, FI_ETRUNC);
SAME_VALUE(kErrorAvailable, FI_EAVAIL);

SAME_NAME(Ops, fi_ops, close);
SAME_NAME(Ops, fi_ops, bind);
SAME_NAME(Ops, fi_ops, control);
SAME_SIZE(Fid, fid);
SAME_NAME(Fid, fid, ops);
SAME_SIZE(Context, fi_context2);

SAME_NAME(EpAttr, fi_ep_attr, type);
SAME_NAME(EpAttr, fi_ep_attr, max_msg_size);
SAME_NAME(DomainAttr, fi_domain_attr, name);
SAME_NAME(DomainAttr, fi_domain_attr, threading);
SAME_NAME(DomainAttr, fi_domain_attr, resource_mgmt);
SAME_NAME(DomainAttr, fi_domain_attr, mr_mode);
SAME_SIZE(FabricAttr, fi_fabric_attr);
SAME_NAME(FabricAttr, fi_fabric_attr, prov_name);
SAME_NAME(Info, fi_info, next);
SAME_NAME(Info, fi_info, caps);
SAME_NAME(Info, fi_info, mode);
SAME_NAME(Info, fi_info, ep_attr);
SAME_NAME(Info, fi_info, domain_attr);
SAME_NAME(Info, fi_info, fabric_attr);

SAME_NAME(OpsFabric, fi_ops_fabric, domain);
SAME_NAME(OpsFabric, fi_ops_fabric, trywait);
SAME_NAME(Fabric, fid_fabric, ops);
SAME_SIZE(AvAttr, fi_av_attr);
SAME_NAME(AvAttr, fi_av_attr, type);
SAME_NAME(AvAttr, fi_av_attr, count);
SAME_NAME(OpsAv, fi_ops_av, insert);
SAME_NAME(Av, fid_av, ops);
SAME_SIZE(CqAttr, fi_cq_attr);
SAME_NAME(CqAttr, fi_cq_attr, format);
SAME_NAME(CqAttr, fi_cq_attr, wait_obj);
SAME_SIZE(CqEntry, fi_cq_msg_entry);
SAME(CqEntry, context, fi_cq_msg_entry, op_context);
SAME(CqEntry, bytes, fi_cq_msg_entry, len);
static_assert(sizeof(abi::CqError) >= sizeof(fi_cq_err_entry));
SAME(CqError, context, fi_cq_err_entry, op_context);
SAME_NAME(CqError, fi_cq_err_entry, err);
SAME_NAME(CqError, fi_cq_err_entry, prov_errno);
SAME_NAME(CqError, fi_cq_err_entry, err_data);
SAME_NAME(CqError, fi_cq_err_entry, err_data_size);
SAME_NAME(OpsCq, fi_ops_cq, read);
SAME_NAME(OpsCq, fi_ops_cq, readerr);
SAME_NAME(OpsCq, fi_ops_cq, strerror);
SAME_NAME(Cq, fid_cq, ops);
SAME(Mr, descriptor, fid_mr, mem_desc);
SAME_NAME(OpsMr, fi_ops_mr, reg);
SAME_NAME(OpsDomain, fi_ops_domain, av_open);
SAME_NAME(OpsDomain, fi_ops_domain, cq_open);
SAME_NAME(OpsDomain, fi_ops_domain, endpoint);
SAME_NAME(Domain, fid_domain, ops);
SAME_NAME(Domain, fid_domain, mr);
SAME_NAME(OpsEp, fi_ops_ep, cancel);
SAME_NAME(OpsCm, fi_ops_cm, getname);
SAME_NAME(OpsMsg, fi_ops_msg, recv);
SAME_NAME(OpsMsg, fi_ops_msg, send);
SAME_NAME(Ep, fid_ep, ops);
SAME_NAME(Ep, fid_ep, cm);
SAME_NAME(Ep, fid_ep, msg);
#endif

TEST(libfabric_abi_is_that_of_the_header) {}
